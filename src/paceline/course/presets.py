"""The suites of the presets: the commands that measure everything a report needs.

A `Scale` has the sizes for one kind of machine; the cases of every scale are made the same way.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from paceline.core.hardware import CUDA
from paceline.core.strategies import StrategyName
from paceline.course import PresetName
from paceline.course.suite import Fields, SuiteCase
from paceline.records import CaseValue

_BATCH = 4
_CONTEXT = 128
"""Tokens per sequence, unless the question varies the context."""
_PRECISIONS = ("float32", "bfloat16")
_KERNELS: dict[str, CaseValue] = {"head_dim": 64, "mask": "causal", "lengths": "even", "group": 1}
"""The variant of every kernel that training usually runs."""
_OVERLAP_RATE = "2gbit"
"""At this rate, communication takes about as long as backward of the laptop model."""
_STRATEGIES: tuple[StrategyName, ...] = (
    *("torch_ddp", "none", "naive", "flat", "overlapped", "ddp"),
)
_TRACED: tuple[StrategyName, ...] = ("naive", "flat", "overlapped", "ddp")
_USUAL_BUCKET = 25
_OVERLAP = "ddp_overlap_individual_parameters, ddp_overlap_bucketed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the cases of a preset."""

    device: str
    models: dict[str, float]
    """Models of the step benchmark, each with its approximate duration in seconds."""
    step_warmup: int
    steps: int
    small_model: str
    """Model for warm-up, compilation and traces."""
    contexts: tuple[int, ...]
    """Contexts of the memory timelines; the forward pass uses the first."""
    attention_widths: tuple[int, ...]
    attention_lengths: tuple[int, ...]
    compiled_lengths: tuple[int, ...]
    implementations: tuple[str, ...]
    flash_widths: tuple[int, ...]
    flash_lengths: tuple[int, ...]
    attention_limit_s: int
    messages: tuple[str, ...]
    world_sizes: tuple[int, ...]
    lab_rates: tuple[str, ...]
    parallel_model: str
    """Model for comparing strategies; up to ten variants are in memory at once."""
    parallel_batch: int
    bucket_sizes: tuple[int | str, ...]
    rounds: int
    round_s: float
    """Approximate duration of one round of the parallel model with one strategy."""
    sharded_model: str
    sharded_ranks: int
    sharded: tuple[StrategyName, ...]
    architectures: tuple[str, ...]
    seconds: float
    """Approximate duration of a medium-sized case."""


_QUICK_LAPTOP = Scale(
    device="cpu",
    models={"bytes-6M": 12, "bytes-34M": 25},
    step_warmup=1,
    steps=3,
    small_model="bytes-6M",
    contexts=(256, 128),
    attention_widths=(64,),
    attention_lengths=(256, 1024, 4096),
    compiled_lengths=(1024,),
    implementations=("naive", "tiled", "sdpa"),
    flash_widths=(64,),
    flash_lengths=(512, 2048),
    attention_limit_s=1,
    messages=("1MB", "10MB", "100MB"),
    world_sizes=(2, 4),
    lab_rates=("1gbit",),
    parallel_model="bytes-34M",
    parallel_batch=2,
    bucket_sizes=(1, 100),
    rounds=3,
    round_s=2.0,
    sharded_model="bytes-34M",
    sharded_ranks=2,
    sharded=("torch_ddp", "zero1"),
    architectures=("sm90",),
    seconds=15,
)
_LAPTOP = dataclasses.replace(
    _QUICK_LAPTOP,
    models={"bytes-34M": 40, "small": 70, "medium": 180, "large": 400, "xl": 15, "2.7B": 15},
    step_warmup=2,
    steps=6,  # The minimum for a comparison to reach a verdict.
    small_model="small",
    contexts=(256, 128, 512),
    attention_widths=(16, 32, 64, 128),
    attention_lengths=(256, 1024, 4096, 8192, 16384),
    compiled_lengths=(256, 1024, 4096),
    flash_widths=(16, 64, 128),
    flash_lengths=(128, 1024, 4096, 16384),
    attention_limit_s=5,
    messages=("1MB", "10MB", "100MB", "1GB"),
    world_sizes=(2, 4, 6),
    lab_rates=("200mbit", "1gbit", "2gbit"),
    parallel_batch=4,
    bucket_sizes=(1, 10, 100, 1000, "auto"),
    rounds=20,
    round_s=3.0,
    sharded_model="small",
    sharded=("torch_ddp", "torch_zero", "zero1", "zero2", "fsdp"),
    architectures=("sm80", "sm90", "sm100"),
    seconds=45,
)
_GPU = dataclasses.replace(
    _LAPTOP,
    device=CUDA,
    models={"small": 30, "medium": 40, "large": 50, "xl": 60, "2.7B": 60},
    step_warmup=5,
    steps=10,
    implementations=("naive", "tiled", "sdpa", "triton"),
    flash_widths=(16, 32, 64, 128),
    flash_lengths=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    attention_limit_s=10,
    world_sizes=(2,),
    lab_rates=(),
    parallel_model="medium",
    bucket_sizes=(1, 10, 100, 1000),
    rounds=20,
    round_s=1.0,
    sharded_model="xl",
)


_QUICK_GPU = dataclasses.replace(
    _GPU,
    models={"small": 30, "medium": 40},
    steps=5,
    rounds=5,
    parallel_model="small",
    sharded_model="medium",
    attention_widths=(64,),
    flash_widths=(64,),
    flash_lengths=(1024, 4096, 16384),
    seconds=30,
)


def find_scale(preset: PresetName, *, quick: bool) -> Scale:
    """Returns the scale of a preset; `quick` selects smaller models, fewer sizes and samples."""
    if preset == "laptop":
        return _QUICK_LAPTOP if quick else _LAPTOP
    scale = _QUICK_GPU if quick else _GPU
    if preset == "8gpu":
        world_sizes = (2, 8) if quick else (2, 4, 6, 8)
        return dataclasses.replace(scale, world_sizes=world_sizes, sharded_ranks=8)
    return scale


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
    compared = ("torch_ddp", "ddp")
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
