"""Measures the overhead of Paceline's harness over a bare loop around all_reduce.

Two ranks on loopback alternate between calls of both, with separate buffers. Appends one
`comparison` record per size to the store.

    python -m studies.parallel.communication_overhead results/communication-overhead.jsonl
"""

import sys
import time

import torch
import torch.distributed as dist

from paceline.benchmarks.collectives import Collective, time_call
from paceline.core.units import MB
from paceline.parallel import RankPool
from studies.harness.records import machine_case, record_comparison
from studies.harness.study import study_parser
from studies.harness.turns import interleaved

WORLD_SIZE = 2
# About half a minute each.
ROUNDS = {1 * MB: 4000, 10 * MB: 1000, 100 * MB: 120}
WARMUP = 5


def both_ways(_rank: int, _world_size: int, size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each call, with the harness and in the bare loop."""
    device = torch.device("cpu")
    collective = Collective("all_reduce", size_bytes, device)
    collective.check()
    buffer = torch.zeros(size_bytes // 4)

    def bare() -> float:
        started = time.perf_counter()
        dist.all_reduce(buffer)
        return time.perf_counter() - started

    ways = {"harness": lambda: time_call(collective, device), "bare": bare}
    return interleaved(ways, rounds, warmup=WARMUP)


def main() -> int:
    """Measures, prints and records the ratios."""
    arguments = study_parser(__doc__).parse_args()
    with RankPool(WORLD_SIZE, timeout_s=300) as pool:
        for size_bytes, rounds in ROUNDS.items():
            seconds = pool.run(both_ways, size_bytes, rounds)[0]
            case = {
                "subject": "paceline bench comm",
                "baseline": "bare torch loop",
                "operation": "all_reduce",
                "size_bytes": size_bytes,
                "world_size": WORLD_SIZE,
                **machine_case(WORLD_SIZE),
                "warmup": WARMUP,
            }
            record_comparison(arguments.store, case, seconds["harness"], seconds["bare"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
