"""Measures the CPU time and peak memory of exact layout searches, on one core.

    OMP_NUM_THREADS=1 python scripts/plan_search_speed.py results/plan-search-speed.jsonl

Appends one `plan_search_speed` record per search to the store.
"""

import argparse
import pathlib
import resource
import subprocess
import sys
import time

from paceline.cli.plan.options import ClusterOptions
from paceline.core import model_preset
from paceline.planner.search.search import search
from paceline.records import Metric, Record, RecordStore, capture_environment

# Model, devices, tokens per batch and per sequence. In the last two cases, the numbers of devices
# and sequences have many divisors, which makes the search space large.
CASES = (
    ("llama3-70B", 64, 4 * 2**20, 8192),
    ("llama3-405B", 16_384, 16 * 2**20, 8192),
    ("gpt3-175B", 12_288, 12 * 2**20, 2048),
    ("gpt3-175B", 92_160, 92_160 * 2048, 2048),
)


def measure(case: int) -> None:
    """Prints candidates, fitting layouts, CPU and elapsed seconds, and peak resident bytes."""
    model, devices, batch_tokens, context = CASES[case]
    cluster = ClusterOptions(batch_tokens=str(batch_tokens), context=context)
    question, costs = cluster.question(model_preset(model), devices), cluster.costs()
    began, processor = time.perf_counter(), time.process_time()
    result = search(question, costs)
    processor, elapsed = time.process_time() - processor, time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(result.num_candidates, result.num_fitting, processor, elapsed, peak)


def main() -> int:
    """Measures each search in a separate process, because peak memory is per process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=pathlib.Path)
    parser.add_argument("--case", type=int)
    arguments = parser.parse_args()
    if arguments.case is not None:
        measure(arguments.case)
        return 0
    store = RecordStore(arguments.store)
    for case, (model, devices, batch_tokens, context) in enumerate(CASES):
        command = [sys.executable, __file__, str(arguments.store), "--case", str(case)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        candidates, fitting, processor, elapsed, peak = map(float, printed.split())
        values = {
            "fitting_layouts": fitting,
            "processor_time_s": processor,
            "elapsed_time_s": elapsed,
            "resident_peak_bytes": peak,
        }
        store.append(
            Record(
                kind="plan_search_speed",
                case={
                    "model": model,
                    "devices": devices,
                    "batch_tokens": batch_tokens,
                    "context": context,
                    "candidates": int(candidates),
                },
                environment=capture_environment(),
                metrics={name: Metric(value=value) for name, value in values.items()},
                outcome="ok",
            )
        )
        print(model, devices, int(candidates), values)
    return 0


if __name__ == "__main__":
    sys.exit(main())
