"""The suites: the commands that measure everything a report needs.

Each `SuiteCase` defines both a command line and the records it should produce, so that the two
cannot diverge.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from paceline.core.strategies import StrategyName
from paceline.course.suite.scales import PresetName, Scale, find_scale
from paceline.records import CaseValue
from paceline.workflows.cases import Fields, SuiteCase

_BATCH = 4
_CONTEXT = 128
"""Tokens per sequence, unless the question varies the context."""
_PRECISIONS = ("float32", "bfloat16")
_KERNELS: dict[str, CaseValue] = {"head_dim": 64, "mask": "causal", "lengths": "even", "group": 1}
"""The variant of every kernel that training usually runs."""
_OVERLAP_RATE = "2gbit"
"""At this rate, communication takes about as long as backward of the laptop model."""
_STRATEGIES: tuple[StrategyName, ...] = (
    *("torch_ddp", "none", "naive", "flat", "overlapped", "bucketed"),
)
_TRACED: tuple[StrategyName, ...] = ("naive", "flat", "overlapped", "bucketed")
_USUAL_BUCKET = 25
_OVERLAP = "ddp_overlap_individual_parameters, ddp_overlap_bucketed"


def suite_cases(preset: PresetName, *, quick: bool = False) -> tuple[SuiteCase, ...]:
    """Returns the cases of a preset in report order; `quick` selects a smaller suite."""
    scale = find_scale(preset, quick=quick)
    return (
        *_step_cases(scale),
        *_profile_cases(scale),
        *_attention_cases(scale),
        *_communication_cases(scale),
        *_parallel_cases(scale),
        _sharding_case(scale),
    )


def _step_cases(scale: Scale) -> Iterator[SuiteCase]:
    usual: dict[str, CaseValue] = {"batch": _BATCH, "context": _CONTEXT, "phase": "train"}
    usual |= {"precision": "float32", "compile": "none"}
    case = functools.partial(SuiteCase, verb="bench step", kind="step", defaults=usual)
    samples: Fields = {"warmup": scale.step_warmup, "steps": scale.steps, "device": scale.device}
    small: Fields = {"model": scale.small_model, **samples}
    for model, seconds in scale.models.items():
        yield case(
            name=f"step-{model}",
            deliverables=("benchmarking_script", "benchmarking_mixed_precision"),
            fields={"model": model, "precision": _PRECISIONS, **samples},
            seconds=seconds,
        )
    yield case(
        name="step-warmup",
        deliverables=("benchmarking_script",),
        fields={**small, "warmup": (0, 1, 2, 5)},
        seconds=2 * scale.seconds,
    )
    yield case(
        name="step-compile",
        deliverables=("torch_compile",),
        fields={**small, "compile": "whole"},
        seconds=3 * scale.seconds,
    )
    phases: Fields = {"context": scale.contexts[0], "phase": ("forward", "train")}
    yield case(
        name="step-naive",
        deliverables=("nsys_profile",),
        fields={**small, "attention": "naive", **phases},
        seconds=2 * scale.seconds,
    )


def _profile_cases(scale: Scale) -> Iterator[SuiteCase]:
    traced = [(scale.contexts[0], "forward", "float32")]
    traced += [(context, "train", "float32") for context in scale.contexts]
    traced += [(scale.contexts[0], "train", "bfloat16")]
    common: Fields = {"model": scale.small_model, "device": scale.device}
    common |= {"attention": "naive", "batch": _BATCH}
    for context, phase, precision in traced:
        yield SuiteCase(
            name=f"profile-{phase}-{context}-{precision}",
            deliverables=("nsys_profile", "memory_profiling"),
            verb="profile step",
            kind="memory_timeline",
            fields={**common, "context": context, "phase": phase, "precision": precision},
            defaults={"compile": "none"},
            options=("--warmup", "2", "--steps", "2"),
            seconds=scale.seconds,
            records_in="directory",
        )


def _attention_cases(scale: Scale) -> Iterator[SuiteCase]:
    usual: dict[str, CaseValue] = {"implementation": "naive", "batch": 8, "causal": False}
    usual |= {"dtype": "float32", "compile": "none"}
    limit_s = scale.attention_limit_s
    case = functools.partial(
        SuiteCase,
        verb="bench attention",
        kind="attention",
        defaults=usual,
        options=("--time-limit-s", str(limit_s)),
    )
    for width in scale.attention_widths:
        shape: Fields = {"head_dim": width, "device": scale.device}
        yield case(
            name=f"attention-{width}",
            deliverables=("pytorch_attention", "torch_compile"),
            fields={**shape, "context": scale.attention_lengths},
            seconds=len(scale.attention_lengths) * (3 + 2 * limit_s),
        )
        yield case(
            name=f"attention-{width}-compiled",
            deliverables=("torch_compile",),
            fields={**shape, "context": scale.compiled_lengths, "compile": "whole"},
            seconds=len(scale.compiled_lengths) * (8 + 2 * limit_s),
        )
    several: Fields = {"implementation": scale.implementations, "context": scale.flash_lengths}
    for width, dtype in itertools.product(scale.flash_widths, _PRECISIONS):
        shape = {"head_dim": width, "dtype": dtype, "device": scale.device}
        yield case(
            name=f"flash-{width}-{dtype}",
            deliverables=("flash_benchmarking",),
            fields={**several, "batch": 1, "causal": True, **shape},
            options=("--time-limit-s", str(limit_s), "--warmup", "1"),
            seconds=len(scale.implementations) * len(scale.flash_lengths) * (3 + 2 * limit_s),
        )
    yield SuiteCase(
        name="kernels",
        deliverables=("flash_forward, flash_backward",),
        verb="bench kernels",
        kind="kernel",
        fields={"architecture": scale.architectures, **_KERNELS},
        seconds=20 * len(scale.architectures),
    )


def _communication_cases(scale: Scale) -> Iterator[SuiteCase]:
    limits = ("--steps", "10", "--time-limit-s", "5")
    case = functools.partial(
        SuiteCase,
        deliverables=("distributed_communication_single_node",),
        verb="bench comm",
        kind="comm",
    )
    usual: dict[str, CaseValue] = {"operation": "all_reduce", "num_hosts": 1}
    for world_size in scale.world_sizes:
        yield case(
            name=f"all-reduce-{world_size}",
            fields={"size_bytes": scale.messages, "device": scale.device},
            defaults={**usual, "world_size": world_size},
            options=("--world-sizes", str(world_size), *limits),
            seconds=3 * world_size + 2 * len(scale.messages),
        )
    sizes = tuple(size for size in scale.messages if size != "1GB")
    for rate in scale.lab_rates:
        yield case(
            name=f"all-reduce-{rate}",
            fields={"size_bytes": sizes, "device": scale.device},
            defaults=usual,
            options=limits,
            seconds=20,
            rate=rate,
        )


def _parallel_cases(scale: Scale) -> Iterator[SuiteCase]:
    """Yields step benchmarks and traces of the strategies, on emulated links on a laptop.

    A comparison keeps all its variants in memory at once, so strategies and bucket sizes are
    compared separately. Both comparisons begin with the same variant, the baseline of the ratios.
    """
    fields: Fields = {"model": scale.parallel_model, "device": scale.device}
    fields |= {"batch": scale.parallel_batch, "context": _CONTEXT}
    defaults: dict[str, CaseValue] = {"precision": "float32", "compile": "none"}
    if scale.lab_rates:
        # On virtual hosts, the lab sets the number of ranks.
        defaults["world_size"] = 2
    else:
        fields["world_size"], defaults["num_hosts"] = scale.world_sizes[-1], 1
    rate = _OVERLAP_RATE if scale.lab_rates else None
    # Results with different warm-up are not comparable, so both comparisons use the same. "auto"
    # needs five rounds to choose a bucket size.
    warmup = 5 if "auto" in scale.bucket_sizes else 1

    def case(*, rounds: int, warmup: int, num_variants: int, **options: Any) -> SuiteCase:
        seconds = scale.seconds + num_variants * (warmup + rounds) * scale.round_s
        return SuiteCase(defaults=defaults, rate=rate, seconds=seconds, **options)

    sizes = (_USUAL_BUCKET, *scale.bucket_sizes)
    rounds = {"warmup": warmup, "rounds": scale.rounds}
    yield case(
        name="strategies",
        deliverables=("naive_ddp", "minimal_ddp_flat", _OVERLAP),
        verb="bench ddp",
        kind="ddp",
        fields={**fields, "strategy": _STRATEGIES, "bucket_size_mb": _USUAL_BUCKET, **rounds},
        num_variants=len(_STRATEGIES),
        **rounds,
    )
    compared = ("torch_ddp", "bucketed")
    yield case(
        name="bucket-sizes",
        deliverables=(_OVERLAP,),
        verb="bench ddp",
        kind="ddp",
        fields={**fields, "strategy": compared, "bucket_size_mb": sizes, **rounds},
        num_variants=len(compared) * len(sizes) - ("auto" in sizes),
        **rounds,
    )
    traced = {"warmup": min(warmup, 2), "rounds": 3}
    yield case(
        name="timelines",
        deliverables=(_OVERLAP,),
        verb="profile ddp",
        kind="timeline",
        fields={**fields, "strategy": _TRACED, "bucket_size_mb": _USUAL_BUCKET},
        options=("--warmup", str(traced["warmup"]), "--rounds", str(traced["rounds"])),
        records_in="directory",
        num_variants=len(_TRACED),
        **traced,
    )


def _sharding_case(scale: Scale) -> SuiteCase:
    """Returns the benchmark of memory by category, with and without sharding."""
    fields: Fields = {"model": scale.sharded_model, "device": scale.device}
    return SuiteCase(
        name="sharding",
        deliverables=("optimizer_state_sharding",),
        verb="bench memory",
        kind="optimizer",
        fields={**fields, "world_size": scale.sharded_ranks, "strategy": scale.sharded},
        defaults={"precision": "float32", "compile": "none"},
        options=("--warmup", "1", "--steps", "3"),
        seconds=1.5 * len(scale.sharded) * scale.seconds,
    )
