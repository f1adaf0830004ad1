"""Flips bits in runs of a small model, and counts how many are found with the right rank.

    python -m studies.reliability.corruption results/corruption.jsonl

All flips of a setup happen in one run: in each interval between checkpoints, a random bit of a
random tensor on a random rank flips at a random step. The run rolls back to its newest checkpoint
after each flip. At the end, its losses must be bit-identical to those of a run without flips. Long
runs without flips count false alarms. Appends one `fault` record per setup to the store.
"""

import dataclasses
import pathlib
import random
import re
import sys
import tempfile
import time
from typing import Any

from paceline.parallel import RankPool
from paceline.training.config import RunConfig, StepConfig
from studies.harness.records import FaultRecords
from studies.harness.study import study_parser
from tests.distributed.faulty_runs import BitFlip, events_of, train_faulty
from tests.distributed.small_runs import changed, losses_of, small_run

EVERY = 5
"""Steps between hash comparisons of ranks."""
INTERVAL = 10
"""Steps between checkpoints; flips happen in the first half of an interval."""
TRIALS = (
    # Strategy, flipped tensors, whether each rank also checks its own state at rest, ranks.
    ("ddp", "weights", False, 4),
    ("ddp", "weights", True, 2),
    ("ddp", "state", True, 2),
    ("zero2", "weights", True, 2),
    ("zero2", "state", True, 4),
    ("fsdp", "weights", True, 4),
    ("fsdp", "state", True, 2),
)


def make_flips(number: int, where: Any, num_ranks: int, seed: int) -> tuple[BitFlip, ...]:
    """Returns one flip in the first half of each interval, after the first checkpoint."""
    chance = random.Random(seed)
    return tuple(
        BitFlip(
            rank=chance.randrange(num_ranks),
            step=INTERVAL * (trial + 1) + chance.randint(1, EVERY),
            where=where,
            tensor=chance.randrange(10**6),
            bit=chance.randrange(10**9),
        )
        for trial in range(number)
    )


def run(pool: RankPool, config: RunConfig, flips: tuple[BitFlip, ...]) -> None:
    """Trains to the end, including rollbacks; raises an error if the run stops early."""
    for outcome in pool.run(train_faulty, config, flips):
        if isinstance(outcome, str):
            raise RuntimeError(outcome)


def count(config: RunConfig, flips: tuple[BitFlip, ...]) -> tuple[int, int]:
    """Returns how many flips were found with the right rank, and the largest delay in steps."""
    found = {}
    for event in events_of(config, "corrupted"):
        match = re.match(r"found at step (\d+): (.*)", event.message)
        assert match is not None, event.message
        found[event.step] = int(match[1]), match[2]
    num_named, latest = 0, 0
    for flip in flips:
        began = (flip.step - 1) // INTERVAL * INTERVAL
        if began not in found:
            print(f"not found: {flip}")
            continue
        step, message = found[began]
        num_named += bool(re.match(rf"rank {flip.rank}\b", message))
        latest = max(latest, step - flip.step)
    return num_named, latest


def main() -> int:
    """Runs all setups, and counts and records the flips that were found."""
    parser = study_parser(__doc__)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10_000, help="of the runs without flips")
    arguments = parser.parse_args()
    records = FaultRecords(arguments.store)
    with tempfile.TemporaryDirectory() as directory:
        base = changed(small_run(pathlib.Path(directory)), "base", checkpoint={"keep_last": 2})
        for number, (strategy, where, at_rest, num_ranks) in enumerate(TRIALS):
            num_steps = INTERVAL * (arguments.flips + 2)
            config = changed(
                base,
                f"flips-{number}",
                training={"steps": num_steps},
                parallel={"strategy": strategy, "timeout_s": 60.0},
                checkpoint={"every_steps": INTERVAL, "asynchronous": False},
                watch={
                    "hash_every_steps": EVERY,
                    "hash_at_rest": at_rest,
                    "on_corruption": "rollback",
                },
            )
            flips = make_flips(arguments.flips, where, num_ranks, seed=number)
            clean = dataclasses.replace(config, out=f"{config.out}-clean")
            began = time.perf_counter()
            with RankPool(num_ranks, timeout_s=60, run_timeout_s=3600) as pool:
                run(pool, config, flips)
                run(pool, clean, ())
            num_named, latest = count(config, flips)
            num_lost = len(flips) - num_named
            if losses_of(config) != losses_of(clean):
                num_lost = len(flips)  # The responsible flip is unknown: count all.
            records.add(
                "watched run",
                f"flipped bits of {where}",
                len(flips),
                num_lost,
                case={
                    "strategy": strategy,
                    "world_size": num_ranks,
                    "hash_every_steps": EVERY,
                    "hash_at_rest": at_rest,
                    "steps": num_steps,
                    "seed": number,
                },
                metrics={"largest_delay_steps": latest, "time_s": time.perf_counter() - began},
            )
        for strategy in ("ddp", "fsdp"):
            config = changed(
                base,
                f"quiet-{strategy}",
                parallel={"strategy": strategy},
                checkpoint={"every_steps": 10**6},
                watch={"hash_every_steps": 1, "hash_at_rest": True},
            )
            config = dataclasses.replace(
                config, training=StepConfig(steps=arguments.steps, batch_size=2, micro_batch_size=1)
            )
            began = time.perf_counter()
            with RankPool(2, timeout_s=60, run_timeout_s=3600) as pool:
                (outcome, _) = pool.run(train_faulty, config, ())
            num_alarms = int(isinstance(outcome, str)) + len(events_of(config, "corrupted"))
            records.add(
                "watched run",
                "none, by step",
                arguments.steps,
                num_alarms,
                case={
                    "strategy": strategy,
                    "world_size": 2,
                    "hash_every_steps": 1,
                    "hash_at_rest": True,
                    "seed": 0,
                },
                metrics={"time_s": time.perf_counter() - began},
            )
    return records.exit_code


if __name__ == "__main__":
    sys.exit(main())
