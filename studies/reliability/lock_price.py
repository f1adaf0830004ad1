"""Measures what the lock of a run's directory adds to the start of `paceline train`.

A run of one step, with the lock and without, in processes that alternate. Compares the CPU time of
the processes, which other load affects least; the metrics also have the elapsed times.

    python -m studies.reliability.lock_price results/lock-price.jsonl

Appends a `comparison` record to the store.
"""

import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time

from paceline.training.config import ModelConfig, ScheduleConfig, StepConfig
from paceline.training.toml_config import encode_config
from studies.harness.records import machine_case, record_comparison
from studies.harness.runs import sample_run
from studies.harness.study import study_parser
from studies.harness.turns import interleaved

_TRAIN = """
import contextlib, sys
import paceline.core.lock
if sys.argv.pop(1) == "without":
    paceline.core.lock.owned = lambda *_, **__: contextlib.nullcontext()
from paceline.__main__ import main
sys.exit(main())
"""


def start(place: pathlib.Path, out: str, kind: str) -> tuple[float, float]:
    """Trains one step in a new directory; returns the CPU seconds and the elapsed ones."""
    shutil.rmtree(out, ignore_errors=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", _TRAIN, kind, "train", "run.toml"],
        cwd=place,
        check=True,
        capture_output=True,
    )
    elapsed_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, elapsed_s


def main() -> int:
    """Measures and records."""
    parser = study_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        config = sample_run(
            place,
            "run",
            model=ModelConfig(num_layers=2, d_model=32, num_heads=2, d_ff=64),
            context=32,
            training=StepConfig(steps=1, batch_size=4),
            schedule=ScheduleConfig(warmup_steps=0),
        )
        (place / "run.toml").write_text(encode_config(config), encoding="utf-8")
        ways = {
            kind: lambda kind=kind: start(place, config.out, kind) for kind in ("with", "without")
        }
        times = interleaved(ways, arguments.rounds)
    cpu_s = {kind: [each for each, _ in pairs] for kind, pairs in times.items()}
    elapsed_s = {kind: [each for _, each in pairs] for kind, pairs in times.items()}
    record_comparison(
        arguments.store,
        {"subject": "start with lock", "baseline": "start without lock", **machine_case()},
        cpu_s["with"],
        cpu_s["without"],
        {"elapsed_s": elapsed_s["with"], "baseline_elapsed_s": elapsed_s["without"]},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
