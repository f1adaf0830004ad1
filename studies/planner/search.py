"""Runs the searches of docs/which-layout.md, and compares them with published layouts.

    OMP_NUM_THREADS=1 python -m studies.planner.search results/plan-search.jsonl
    OMP_NUM_THREADS=1 python -m studies.planner.search results/plan-search-experts.jsonl --experts

Appends one `plan_search` record per layout to the store.
"""

import sys
from collections.abc import Iterator

from paceline.core.presets import find_preset
from paceline.core.specs import DType
from paceline.planner.search.advice import compare, pareto_front
from paceline.planner.search.budget import estimate_run
from paceline.planner.search.cluster_options import ClusterOptions
from paceline.planner.search.search import Candidate, SearchResult, search
from paceline.records import Metric, Record, RecordStore, capture_environment
from studies.harness.study import study_parser

LLAMA3_TOKENS = 15.6e12
# The Llama 3 Herd of Models, 2024, table 4: devices, tokens per batch and per sequence, layout, and
# measured TFLOP/s per device. The first two rows recompute nothing. The degrees of the third row
# multiply to 8,192 devices, but the table prints 16,384; 16,384 is used.
LLAMA3 = (
    (8_192, 16 * 2**20, 8_192, "tp=8,cp=1,pp=16,recompute=none", 430.0),
    (16_384, 16 * 2**20, 8_192, "tp=8,cp=1,pp=16,recompute=none", 400.0),
    (16_384, 16 * 2**20, 131_072, "tp=8,cp=16,pp=16", 380.0),
)
# NeMo recipes on H100s: model, devices, sequences per batch, layout, measured seconds per step.
# These rows are part of the calibration data; the search's own choices are not.
NVIDIA = (
    ("llama3-70B", 64, 128, "tp=4,cp=2,pp=4,vp=5,zero=1,micro=1,recompute=none", 14.72),
    ("llama3-70B", 64, 128, "tp=4,cp=1,pp=8,vp=5,zero=1,micro=1,recompute=none", 14.66),
    ("llama3-405B", 576, 252, "tp=8,cp=2,pp=9,vp=7,zero=1,micro=1,recompute=none", 17.2),
)
# Megatron-Bridge recipes for mixtures of experts on H100s in float8, releases 26.06, 26.02.01 and
# 26.04.01, with the same columns. Seconds are derived from tokens per second per device. The
# recipes do not state what they recompute.
MIXTURES = (
    ("qwen3-30B-A3B", 16, 1024, "tp=1,cp=1,pp=1,ep=16,zero=1,micro=1", 29.70),
    ("qwen3-30B-A3B", 16, 1024, "tp=1,cp=1,pp=2,vp=12,ep=8,zero=1,micro=1", 28.94),
    ("qwen3-235B-A22B", 256, 8192, "tp=2,cp=1,pp=8,vp=4,ep=32,zero=1,micro=1", 76.56),
)
_PUBLISHED = "published by Meta"
_OF_EXPERTS = "megatron-bridge"


def main() -> int:
    """Runs the searches and appends one record per layout."""
    parser = study_parser(__doc__)
    parser.add_argument("--experts", action="store_true", help="mixtures instead of dense models")
    arguments = parser.parse_args()
    store = RecordStore(arguments.store)
    if arguments.experts:
        records = (*experts(), *expert_recipes())
    else:
        records = (*example(), *pareto(), *nvidia(), *llama3(), *hundred_thousand())
    for record in records:
        store.append(record)
    return 0


def _search(
    model: str,
    devices: int,
    batch_tokens: int,
    context: int,
    precision: DType = "bfloat16",
    *,
    framework: str = "nemo",
) -> SearchResult:
    cluster = ClusterOptions(
        batch_tokens=str(batch_tokens), context=context, precision=precision, framework=framework
    )
    shape, experts = find_preset(model)
    spec = cluster.spec(shape, devices, experts=experts)
    performance = cluster.performance(of_experts=experts is not None)
    return search(spec, performance, top=8, peak_flops=cluster.peak_flops())


def example() -> Iterator[Record]:
    """Yields the best layouts of the page's first table."""
    result = _search("llama3-70B", 64, 4 * 2**20, 8192)
    for rank, choice in enumerate(result.choices, start=1):
        yield _record("example", "llama3-70B", 64, result, choice, rank, tokens=1e12)


def pareto() -> Iterator[Record]:
    """Yields the best layout for each number of devices."""
    result = _search("llama3-70B", 64, 4 * 2**20, 8192)
    for point in pareto_front(result.spec, result.performance):
        record = _record("front", "llama3-70B", point.devices, result, point.choice, 1, tokens=1e12)
        record.case["on_front"] = point.on_front
        yield record


def nvidia() -> Iterator[Record]:
    """Yields NVIDIA's recipes, predicted and measured, each after the search's best layout."""
    for model, devices, sequences, asked, measured_s in NVIDIA:
        result = _search(model, devices, sequences * 8192, 8192)
        peak = ClusterOptions().peak_flops()
        yield from _beside("NVIDIA", model, devices, result, peak, asked, measured_s)


def _beside(
    study: str,
    model: str,
    devices: int,
    result: SearchResult,
    peak: float,
    asked: str,
    measured_s: float,
) -> Iterator[Record]:
    """Yields the search's best layout, then a published layout, predicted and measured."""
    other = compare(asked, result.best, result.spec, result.performance, peak)
    for rank, choice in enumerate((result.best, other.other), start=1):
        record = _record(study, model, devices, result, choice, rank, tokens=1e12)
        if rank > 1:
            record.case["reason"] = f"published by NVIDIA as {asked}"
            record.metrics["measured_step_time_s"] = Metric(value=measured_s)
        yield record


def experts() -> Iterator[Record]:
    """Yields the best layouts of a mixture of experts."""
    result = _search("qwen3-30B-A3B", 16, 4 * 2**20, 4096, "float8", framework=_OF_EXPERTS)
    for rank, choice in enumerate(result.choices, start=1):
        yield _record("experts", "qwen3-30B-A3B", 16, result, choice, rank, tokens=1e12)


def expert_recipes() -> Iterator[Record]:
    """Yields Megatron-Bridge's recipes for mixtures, each after the search's best layout."""
    for model, devices, sequences, asked, measured_s in MIXTURES:
        result = _search(model, devices, sequences * 4096, 4096, "float8", framework=_OF_EXPERTS)
        peak = ClusterOptions(precision="float8").peak_flops()
        yield from _beside("experts, NVIDIA", model, devices, result, peak, asked, measured_s)


def llama3() -> Iterator[Record]:
    """Yields Meta's layouts of Llama 3 405B, each after the search's best layout."""
    for devices, batch_tokens, context, asked, measured in LLAMA3:
        # No run of Meta's own stack is known.
        result = _search("llama3-405B", devices, batch_tokens, context, framework="other")
        peak = ClusterOptions().peak_flops()
        other = compare(asked, result.best, result.spec, result.performance, peak)
        best = _record(
            "Llama 3", "llama3-405B", devices, result, result.best, 1, tokens=LLAMA3_TOKENS
        )
        yield best
        theirs = _record(
            "Llama 3", "llama3-405B", devices, result, other.other, 2, tokens=LLAMA3_TOKENS
        )
        theirs.case["reason"] = f"{_PUBLISHED} as {asked}"
        theirs.metrics["measured_mfu"] = Metric(value=measured * 1e12 / peak)
        yield theirs


def hundred_thousand() -> Iterator[Record]:
    """Yields the best layouts of 100,000 devices, for batches from 16M to 128M tokens."""
    for millions in (16, 32, 64, 128):
        result = _search("llama3-405B", 100_000, millions * 2**20, 8192)
        study = "100,000 devices"
        yield _record(study, "llama3-405B", 100_000, result, result.best, 1, tokens=LLAMA3_TOKENS)


def _record(
    study: str,
    model: str,
    devices: int,
    result: SearchResult,
    choice: Candidate,
    rank: int,
    *,
    tokens: float,
) -> Record:
    spec, time = result.spec, choice.step_time_s
    run = estimate_run(
        choice, spec.shape, tokens=tokens, held_devices=devices, experts=spec.experts
    )
    values = {
        "mfu": choice.mfu,
        "peak_bytes": choice.peak_bytes,
        "capacity_bytes": choice.capacity_bytes,
        "bubble_share": choice.bubble_share,
        "exposed_share": choice.exposed_share,
        "days": run.days,
        "days_without_failures": run.days_without_failures,
        "goodput": run.goodput,
        "device_hours": run.device_hours,
        "interruptions": run.interruptions,
        "num_candidates": float(result.num_candidates),
    }
    metrics = {name: Metric(value=value) for name, value in values.items() if value is not None}
    metrics["step_time_s"] = Metric.from_estimate(time)
    return Record(
        kind="plan_search",
        case={
            "study": study,
            "model": model,
            "device": "h100-sxm",
            "devices": devices,
            "batch_tokens": spec.tokens_per_step,
            "context": spec.context_length,
            "rank": rank,
            "layout": choice.name,
            "calibration": result.performance.name,
            "bound": choice.bound,
            "num_devices_used": choice.devices,
        },
        environment=capture_environment(),
        metrics=metrics,
        outcome="ok",
    )


if __name__ == "__main__":
    sys.exit(main())
