"""Measures the CPU time and peak memory of exact layout searches, on one core.

    OMP_NUM_THREADS=1 python -m studies.planner.search_speed results/plan-search-speed.jsonl

Appends one `plan_search_speed` record per search to the store.
"""

import sys
import time

from paceline.core import model_preset
from paceline.planner.search.cluster_options import ClusterOptions
from paceline.planner.search.search import search
from studies.harness.records import append_record
from studies.harness.study import in_fresh_process, resident_peak_bytes, study_parser

# Model, devices, tokens per batch and per sequence. In the last two cases, the numbers of devices
# and sequences have many divisors, which makes the search space large.
CASES = (
    ("llama3-70B", 64, 4 * 2**20, 8192),
    ("llama3-405B", 16_384, 16 * 2**20, 8192),
    ("gpt3-175B", 12_288, 12 * 2**20, 2048),
    ("gpt3-175B", 92_160, 92_160 * 2048, 2048),
)


def measure(
    model: str, devices: int, batch_tokens: int, context: int
) -> tuple[int, dict[str, float]]:
    """Returns the number of candidates, and the cost of their search."""
    cluster = ClusterOptions(batch_tokens=str(batch_tokens), context=context, framework="nemo")
    spec, performance = cluster.spec(model_preset(model), devices), cluster.performance()
    began, processor = time.perf_counter(), time.process_time()
    result = search(spec, performance)
    processor, elapsed = time.process_time() - processor, time.perf_counter() - began
    return result.num_candidates, {
        "fitting_layouts": result.num_fitting,
        "processor_time_s": processor,
        "elapsed_time_s": elapsed,
        "resident_peak_bytes": resident_peak_bytes(),
    }


def main() -> int:
    """Measures each search in a process of its own."""
    arguments = study_parser(__doc__).parse_args()
    for model, devices, batch_tokens, context in CASES:
        candidates, numbers = in_fresh_process(measure, model, devices, batch_tokens, context)
        case = {
            "model": model,
            "devices": devices,
            "batch_tokens": batch_tokens,
            "context": context,
            "candidates": candidates,
        }
        append_record(arguments.store, "plan_search_speed", case, numbers)
        print(model, devices, candidates, numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
