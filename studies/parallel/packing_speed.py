"""Packs and unpacks gradients of a model on one core, beside copies of the same memory.

The numbers are as many as bytes-34M has parameters. The ways take turns, so that noise affects all.
Appends one `comparison` record per code and way, whose `bytes_per_s` counts the bytes of float32.

    python -m studies.parallel.packing_speed results/packing-speed.jsonl
"""

import time
from collections.abc import Callable

import torch

from paceline.accounting.counts import count_parameters
from paceline.core.presets import model_preset
from paceline.parallel.compression.codec import BLOCK, Codec, CodeName
from studies.harness.records import machine_case, record_comparison
from studies.harness.study import study_parser

_CODES: tuple[CodeName, ...] = ("int4", "int8")
_MODEL = "bytes-34M"
_FLOAT32_BYTES = 4
_WARMUP = 1


def main() -> None:
    """Measures in turns, and records each way beside the copy of the same round."""
    parser = study_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_blocks = count_parameters(model_preset(_MODEL)).total // BLOCK
    length = num_blocks * BLOCK
    values, residual = torch.randn(length), torch.zeros(length)
    target, copy = torch.zeros(length), torch.empty(length)
    for code in _CODES:
        codec = Codec(code)
        row = torch.empty(codec.row_bytes(num_blocks), dtype=torch.uint8)
        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda: copy.copy_(values),
            "pack": lambda codec=codec, row=row: codec.pack(values, residual, row),
            "unpack": lambda codec=codec, row=row: codec.unpack(row, target, adds=False),
            "unpack and add": lambda codec=codec, row=row: codec.unpack(row, target, adds=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(_WARMUP + arguments.rounds):
            for name, run in ways.items():
                began = time.perf_counter()
                run()
                if number >= _WARMUP:
                    seconds[name].append(time.perf_counter() - began)
        for name in list(ways)[1:]:
            case = {"subject": f"{name} {code}", "baseline": "memcpy", "model": _MODEL}
            rates = [_FLOAT32_BYTES * length / each for each in seconds[name]]
            record_comparison(
                arguments.store,
                {**case, "size_bytes": _FLOAT32_BYTES * length, **machine_case(1)},
                seconds[name],
                seconds["memcpy"],
                {"bytes_per_s": rates},
            )


if __name__ == "__main__":
    main()
