"""Runs random training programs under a container, and compares them with one process.

    python -m studies.parallel.fuzz sharded 1000 --store results/fuzz.jsonl
    python -m studies.parallel.fuzz all 1000 --store results/fuzz.jsonl
    python -m studies.parallel.fuzz sharded 1 --first 417

The container and the seed determine a program. All programs run in float64. With --store, appends
one `fuzz` record per container.
"""

import sys
import time

from paceline.parallel import RankPool
from studies.harness.records import append_record, machine_case
from studies.harness.study import study_parser
from tests.distributed.fuzz import DTYPE, MAKE, TOLERANCE, run_programs

_AT_ONCE = 50


def fuzz(pool: RankPool, kind: str, seeds: range) -> dict[str, float]:
    """Runs programs and prints those that differ; returns their number and largest difference."""
    began = time.perf_counter()
    different = set()
    largest = 0.0
    for first in range(seeds.start, seeds.stop, _AT_ONCE):
        some = range(first, min(first + _AT_ONCE, seeds.stop))
        for rank, outcomes in enumerate(pool.run(run_programs, kind, some)):
            for seed, name, difference in outcomes:
                largest = max(largest, difference)
                if difference > TOLERANCE:
                    different.add(seed)
                    print(f"{kind}, seed {seed}, rank {rank}: {name} differs by {difference:.2g}")
    return {
        "num_different": len(different),
        "largest_difference": largest,
        "time_s": time.perf_counter() - began,
    }


def main() -> int:
    """Runs programs of one container, or of all."""
    parser = study_parser(__doc__, "--store")
    parser.add_argument("container", choices=[*MAKE, "all"])
    parser.add_argument("programs", type=int)
    parser.add_argument("--first", type=int, default=0, help="the first program's seed")
    parser.add_argument("--ranks", type=int, default=3)
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.programs)
    kinds = list(MAKE) if arguments.container == "all" else [arguments.container]
    total = 0
    with RankPool(arguments.ranks, timeout_s=900) as pool:
        for kind in kinds:
            metrics = fuzz(pool, kind, seeds)
            total += int(metrics["num_different"])
            print(
                f"{kind}: {len(seeds)} programs, {metrics['num_different']} differ, at most by "
                f"{metrics['largest_difference']:.2g}, {metrics['time_s']:.0f} s"
            )
            if arguments.store is not None:
                case = {
                    "container": kind,
                    "programs": len(seeds),
                    "first_seed": seeds.start,
                    "world_size": arguments.ranks,
                    "dtype": str(DTYPE).removeprefix("torch."),
                    "tolerance": TOLERANCE,
                    **machine_case(),
                }
                append_record(arguments.store, "fuzz", case, metrics)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
