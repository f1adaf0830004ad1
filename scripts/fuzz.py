"""Runs random training programs under a container, and records whether any differed.

    python scripts/fuzz.py sharded 1000 --store results/fuzz.jsonl
    python scripts/fuzz.py all 1000 --store results/fuzz.jsonl
    python scripts/fuzz.py sharded 1 --first 417

A program is a function of the container and its seed; it is compared with one process.
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from paceline.benchmarks.harness.devices import describe_hardware, resolve_device
from paceline.benchmarks.harness.records import measured
from paceline.parallel import RankPool
from paceline.records import RecordStore
from tests.distributed.fuzz import MAKE, TOLERANCE, run_programs

_AT_ONCE = 50


def fuzz(pool: RankPool, kind: str, seeds: range) -> tuple[int, float]:
    """Runs programs, printing those that differ; returns how many did, and the seconds."""
    began = time.perf_counter()
    different = set()
    for first in range(seeds.start, seeds.stop, _AT_ONCE):
        some = range(first, min(first + _AT_ONCE, seeds.stop))
        for rank, wrong in enumerate(pool.run(run_programs, kind, some)):
            for seed, name, difference in wrong:
                different.add(seed)
                print(f"{kind}, seed {seed}, rank {rank}: {name} differs by {difference:.2g}")
    return len(different), time.perf_counter() - began


def main() -> int:
    """Runs programs of one container, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("container", choices=[*MAKE, "all"])
    parser.add_argument("programs", type=int)
    parser.add_argument("--first", type=int, default=0, help="the first program's seed")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--store", type=pathlib.Path, default=None)
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.programs)
    kinds = list(MAKE) if arguments.container == "all" else [arguments.container]
    total = 0
    with RankPool(arguments.ranks, timeout_s=120) as pool:
        for kind in kinds:
            num_different, seconds = fuzz(pool, kind, seeds)
            total += num_different
            print(f"{kind}: {len(seeds)} programs, {num_different} differ, {seconds:.0f} s")
            if arguments.store is not None:
                case = {
                    "container": kind,
                    "programs": len(seeds),
                    "first_seed": seeds.start,
                    "world_size": arguments.ranks,
                    "tolerance": TOLERANCE,
                    **describe_hardware(resolve_device("cpu")).as_case(),
                }
                metrics = {"num_different": num_different, "time_s": seconds}
                RecordStore(arguments.store).append(measured("fuzz", case, metrics))
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
