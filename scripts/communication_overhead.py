"""Measures the overhead of Paceline's harness over a bare loop around all_reduce.

Two ranks on loopback alternate between calls of both, with separate buffers. Appends one
`comparison` record per size to the store.

    python scripts/communication_overhead.py results/communication-overhead.jsonl
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist

from paceline.benchmarks.collectives import Collective, time_call
from paceline.benchmarks.harness.measure import ratio_metric
from paceline.benchmarks.harness.records import measured
from paceline.core.units import MB
from paceline.parallel import RankPool
from paceline.parallel.ranks.hardware import describe_hardware
from paceline.records import RecordStore
from paceline.records.environment import threads_per_rank

WORLD_SIZE = 2
# About half a minute each.
ROUNDS = {1 * MB: 4000, 10 * MB: 1000, 100 * MB: 120}
WARMUP = 5


def both_ways(_rank: int, _world_size: int, size_bytes: int, rounds: int) -> list[list[float]]:
    """Returns the seconds of each call, with the harness and in the bare loop."""
    device = torch.device("cpu")
    collective = Collective("all_reduce", size_bytes, device)
    collective.check()
    buffer = torch.zeros(size_bytes // 4)

    def bare() -> float:
        started = time.perf_counter()
        dist.all_reduce(buffer)
        return time.perf_counter() - started

    samples: list[list[float]] = [[], []]
    for round_index in range(-WARMUP, rounds):
        ways = [(0, lambda: time_call(collective, device)), (1, bare)]
        for way, run in ways if round_index % 2 else reversed(ways):
            seconds = run()
            if round_index >= 0:
                samples[way].append(seconds)
    return samples


def main() -> int:
    """Measures, prints and records the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store")
    arguments = parser.parse_args()
    with RankPool(WORLD_SIZE, timeout_s=300) as pool:
        for size_bytes in ROUNDS:
            rounds = ROUNDS[size_bytes]
            subject, baseline = pool.run(both_ways, size_bytes, rounds)[0]
            ratio = ratio_metric(subject, baseline)
            record = measured(
                "comparison",
                {
                    "subject": "paceline bench comm",
                    "baseline": "bare torch loop",
                    "operation": "all_reduce",
                    "size_bytes": size_bytes,
                    "world_size": WORLD_SIZE,
                    **describe_hardware(torch.device("cpu")).as_case(),
                    "threads": threads_per_rank(WORLD_SIZE),
                    "warmup": WARMUP,
                    "rounds": rounds,
                },
                {"time_ratio": ratio, "time_s": subject, "baseline_time_s": baseline},
            )
            RecordStore(arguments.store).append(record)
            print(f"{size_bytes}: {ratio.value:.4f} (95% {ratio.low:.4f} to {ratio.high:.4f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
