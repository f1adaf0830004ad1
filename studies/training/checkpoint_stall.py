"""Measures the cost of checkpoints to a training run: synchronous, asynchronous and in memory.

Two ranks train bytes-34M with AdamW on random tokens, in rounds of 20 steps. A round begins with no
checkpoint, with a synchronous one, with an asynchronous one that is written during the next steps,
or with one that is kept in memory with a replica, as if each rank were a host. The four kinds take
turns. A round's time includes the slowdown of the steps after the save; no save is in flight when a
round begins. Appends one `comparison` record per kind of checkpoint to the store.

    python -m studies.training.checkpoint_stall results/checkpoint-stall.jsonl [--strategy zero2]
"""

import functools
import itertools
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.memory import MemoryCheckpointer
from paceline.checkpoint.state import training_state
from paceline.core import model_preset
from paceline.models import TransformerLM, next_token_loss
from paceline.parallel import run_ranks
from paceline.parallel.strategies import apply_strategy, make_optimizer
from studies.harness.records import machine_case, record_comparison
from studies.harness.study import study_parser
from studies.harness.turns import interleaved

MODEL = "bytes-34M"
KINDS = ("none", "synchronous", "asynchronous", "in memory")


def train(
    rank: int, world_size: int, options: dict[str, str | int], place: str, memory: str
) -> dict[str, list[tuple[float, float]]]:
    """Returns the seconds of each kind's rounds and of their calls to `save`."""
    torch.manual_seed(0)
    shape = model_preset(MODEL)
    strategy = options["strategy"]
    model = apply_strategy(strategy, TransformerLM(shape))
    optimizer = make_optimizer(strategy, model, torch.optim.AdamW, lr=1e-4)
    tokens = torch.randint(shape.vocab_size, (options["batch"], options["context"] + 1))
    checkpointers: dict[str, Checkpointer] = {
        kind: Checkpointer(f"{place}/{kind}", keep=1, asynchronous=kind == "asynchronous")
        for kind in KINDS[1:3]
    }
    host = pathlib.Path(memory, str(rank))
    host.mkdir()
    checkpointers["in memory"] = MemoryCheckpointer(str(host), place)
    numbers = itertools.count()

    def run_round(kind: str) -> tuple[float, float]:
        dist.barrier()
        number = next(numbers)
        started = time.perf_counter()
        stalled = 0.0
        if kind in checkpointers:
            # Save first, so that its whole effect on later steps falls into the round.
            state = training_state(model, {"main": optimizer})
            checkpointers[kind].save(number, state, {"step": number})
            stalled = time.perf_counter() - started
        for _ in range(options["steps"]):
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - started
        for checkpointer in checkpointers.values():
            checkpointer.wait()
        return seconds, stalled

    ways = {kind: functools.partial(run_round, kind) for kind in KINDS}
    found = interleaved(ways, options["rounds"])
    for checkpointer in checkpointers.values():
        checkpointer.close()
    return found


def main() -> int:
    """Measures, prints and records the cost."""
    parser = study_parser(__doc__)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument(
        "--place", help="a directory for the checkpoints; a temporary one otherwise"
    )
    parser.add_argument("--memory", default="/dev/shm", help="a tmpfs for those in memory")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=arguments.place) as place,
        tempfile.TemporaryDirectory(dir=arguments.memory) as memory,
    ):
        found = run_ranks(train, 2, vars(arguments), place, memory, timeout_s=3600)[0]
        size = sum(path.stat().st_size for path in pathlib.Path(place, KINDS[1]).rglob("*"))
    baseline_s = [seconds for seconds, _ in found["none"]]
    for kind in KINDS[1:]:
        case = {
            "subject": f"checkpoint, {kind}",
            "baseline": "no checkpoint",
            "operation": f"{arguments.steps} steps of {MODEL}, {arguments.strategy}",
            "model": MODEL,
            "batch": arguments.batch,
            "context": arguments.context,
            "size_bytes": size,
            "world_size": 2,
            **machine_case(),
        }
        seconds, stalls = map(list, zip(*found[kind], strict=True))
        record_comparison(arguments.store, case, seconds, baseline_s, {"stall_s": stalls})
        print(f"    {size / 1e6:.0f} MB, save itself {statistics.median(stalls):.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
