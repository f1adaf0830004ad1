"""Injects non-finite steps, slow ranks and stopped ranks, and checks that each is detected.

    python -m studies.reliability.bad_steps results/bad-steps.jsonl

- Non-finite: in many steps of one run, one rank's gradients become NaN or the loss of its batch
  infinite. All ranks must skip the same batches: losses and parameters must be bit-identical to
  those of a run without these batches, and every other sample must be used exactly once.
- Slow: from some step on, a rank takes 1.5 times as long. It must be named within ten steps, and no
  other rank may ever be named.
- Stopped: a rank receives SIGSTOP for five seconds. It must be named in the first step after that.

Appends one `fault` record per fault and strategy to the store.
"""

import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import time
from typing import Literal

import torch

from paceline.parallel import RankPool
from paceline.training.config import RunConfig
from paceline.training.run_directory import audit_run
from paceline.training.toml_config import encode_config
from studies.harness.records import FaultRecords
from studies.harness.runs import write_config
from studies.harness.study import start_paceline, study_parser
from tests.distributed.faulty_runs import Poison, events_of, saved_tensors, train_faulty
from tests.distributed.small_runs import changed, losses_of, small_run
from tests.processes import process_of_rank

STRATEGIES = ("ddp", "zero2", "fsdp")
_STEP_S = 0.06
"""Sleep per step. It is most of a step, so that other load on the machine matters less."""
_KINDS: tuple[Literal["nan", "infinite"], ...] = ("nan", "infinite")
_FEWEST_STEPS, _WITHIN = 12, 10
_STOPPED_S = 5.0
_LONGEST_S = 120.0
_WAS_STOPPED = r"rank (\d+) was stopped for [4-9][. ]"


def not_finite(base: RunConfig, strategy: str, number: int, seed: int) -> int:
    """Poisons `number` steps of a run; returns how many were handled incorrectly."""
    chance = random.Random(seed)
    num_steps = 2 * number
    bad = sorted(chance.sample(range(2, num_steps), number))
    poisons = tuple(
        Poison(rank=chance.randrange(2), passes=(step,), kind=chance.choice(_KINDS)) for step in bad
    )
    sections: dict[str, dict[str, object]] = {
        "training": {"steps": num_steps - number},
        "parallel": {"strategy": strategy},
        "checkpoint": {"every_steps": num_steps},
    }
    watch = {"on_nonfinite": "skip", "most_in_a_row": number}
    skipping = changed(base, f"skipping-{strategy}", **sections, watch=watch)
    without = changed(base, f"without-{strategy}", **sections)
    with RankPool(2, timeout_s=60, run_timeout_s=600) as pool:
        pool.run(train_faulty, skipping, (), poisons)
        pool.run(train_faulty, without, (), (), tuple(bad))
    (pathlib.Path(skipping.out) / "config.toml").write_text(encode_config(skipping))
    num_skipped = len(events_of(skipping, "skipped"))
    ours, theirs = (saved_tensors(each, num_steps - number) for each in (skipping, without))
    is_equal = losses_of(skipping) == losses_of(without) and all(
        torch.equal(values, ours[name]) for name, values in theirs.items()
    )
    _, findings = audit_run(pathlib.Path(skipping.out))
    if not is_equal or findings:
        return number  # The responsible step is unknown: count all.
    return abs(number - num_skipped)


def slow(base: RunConfig, strategy: str, seed: int) -> int:
    """Slows a rank down; returns 0 if it was named in time and no other rank was, else 1."""
    chance = random.Random(seed)
    num_steps = 2 * _FEWEST_STEPS + _WITHIN
    rank, since = chance.randrange(2), chance.randint(_FEWEST_STEPS, 2 * _FEWEST_STEPS)
    config = changed(
        base,
        f"slow-{strategy}-{seed}",
        training={"steps": num_steps},
        parallel={"strategy": strategy},
    )
    every = tuple(range(1, num_steps + 1))
    even = [Poison(rank=each, passes=every, kind="slow", seconds=_STEP_S) for each in (0, 1)]
    late = Poison(rank=rank, passes=every[since - 1 :], kind="slow", seconds=_STEP_S / 2)
    with RankPool(2, timeout_s=60, run_timeout_s=600) as pool:
        pool.run(train_faulty, config, (), (*even, late))
    events = events_of(config, "straggler")
    is_right = (
        bool(events)
        and all(event.message.startswith(f"rank {rank} ") for event in events)
        and since <= events[0].step <= since + _WITHIN
    )
    if not is_right:
        print(f"lost: {strategy}, seed {seed}: rank {rank} from {since}: {events}")
    return int(not is_right)


def stopped(base: RunConfig, number: int, seed: int) -> int:
    """Stops random ranks of one run; returns how many stops were not attributed correctly."""
    chance = random.Random(seed)
    config = changed(base, "stopped", training={"steps": 10**7}, checkpoint={"every_steps": 10**6})
    metrics = pathlib.Path(config.out) / "metrics.jsonl"
    log = pathlib.Path(f"{config.out}.log")
    process = start_paceline("train", str(write_config(config)), "--ranks", "2", log=log)

    def wait_for_steps(more: int) -> None:
        before = len(losses_of(config)) if metrics.exists() else 0
        deadline = time.monotonic() + _LONGEST_S
        while not metrics.exists() or len(losses_of(config)) < before + more:
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError("the run makes no steps")
            time.sleep(0.1)

    stops: list[int] = []
    for _ in range(number):
        wait_for_steps(20)
        stops.append(chance.randrange(2))
        pid = process_of_rank(process.pid, stops[-1])
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_STOPPED_S)
        os.kill(pid, signal.SIGCONT)
    wait_for_steps(20)
    process.terminate()
    process.wait(_LONGEST_S)
    messages = [event.message for event in events_of(config, "straggler")]
    told = [int(found[1]) for each in messages if (found := re.match(_WAS_STOPPED, each))]
    if stops != told:
        print(f"lost: stopped {stops}, told {messages}")
    return sum(a != b for a, b in zip(stops, told, strict=False)) + abs(len(stops) - len(told))


def main() -> int:
    """Injects all faults, and prints and records the results."""
    parser = study_parser(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="that are not finite, by strategy")
    parser.add_argument("--slow", type=int, default=7, help="runs with a slow rank, by strategy")
    parser.add_argument("--stops", type=int, default=20)
    arguments = parser.parse_args()
    records, subject = FaultRecords(arguments.store), "watched run"
    with tempfile.TemporaryDirectory() as directory:
        base = small_run(pathlib.Path(directory))
        for seed, strategy in enumerate(STRATEGIES):
            case = {"world_size": 2, "strategy": strategy, "seed": seed}
            lost = not_finite(base, strategy, arguments.steps, seed)
            records.add(subject, "NaN or infinity on one rank", arguments.steps, lost, case=case)
            lost = sum(slow(base, strategy, each) for each in range(arguments.slow))
            records.add(subject, "a rank half as slow again", arguments.slow, lost, case=case)
        lost = stopped(base, arguments.stops, seed=0)
        records.add(subject, "SIGSTOP for 5 s", arguments.stops, lost, case={"world_size": 2})
    return records.exit_code


if __name__ == "__main__":
    sys.exit(main())
