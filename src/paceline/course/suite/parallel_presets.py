"""The suite's cases that need several ranks and train: strategies, buckets, traces, sharding."""

from collections.abc import Iterator

from paceline.core.strategies import BUCKET_STRATEGIES, StrategyName
from paceline.course.suite.scales import CONTEXT, RATES, Scale, words
from paceline.records import CaseValue
from paceline.records.kinds import LINK_RATE
from paceline.workflows.cases import Expected, SuiteCase

_WARMUP = 1
_AUTO_WARMUP = 5
"""Rounds that an automatic bucket size needs before it has chosen."""
_OVERLAP_RATE = "2gbit"
"""A link that takes about as long as backward of the laptop's model."""
_CONTAINERS: tuple[StrategyName, ...] = (
    *("torch_ddp", "none", "naive", "flat", "overlapped", "bucketed"),
)
_TRACED: tuple[StrategyName, ...] = ("naive", "flat", "overlapped", "bucketed")
_USUAL_BUCKET = "25"
_TRACED_WARMUP = 2
_TRACED_ROUNDS = 3
_DATA_PARALLEL = (
    "naive_ddp",
    "minimal_ddp_flat",
    "ddp_overlap_individual_parameters, ddp_overlap_bucketed",
)


def parallel_cases(scale: Scale) -> Iterator[SuiteCase]:
    """Yields steps of strategies and traces of them: on links where a laptop emulates them.

    A comparison holds all its variants in memory at once, so there are two: of the strategies, and
    of the sizes of buckets. Both begin with the same variant, to which ratios are.
    """
    yield _compared(scale, "strategies", _DATA_PARALLEL, _CONTAINERS, (_USUAL_BUCKET,))
    yield _compared(
        scale,
        "bucket-sizes",
        _DATA_PARALLEL[-1:],
        ("torch_ddp", "bucketed"),
        (_USUAL_BUCKET, *scale.bucket_sizes),
    )
    yield SuiteCase(
        name="timelines",
        deliverables=_DATA_PARALLEL[-1:],
        arguments=(
            *("profile", "ddp", *_parallel_flags(scale), "--strategies", *_TRACED),
            *("--bucket-size-mb", _USUAL_BUCKET),
            *words("--warmup", _TRACED_WARMUP, "--rounds", _TRACED_ROUNDS),
        ),
        expected=tuple(
            Expected(kind="timeline", fields={**_parallel_fields(scale), "strategy": strategy})
            for strategy in _TRACED
        ),
        seconds=scale.seconds + len(_TRACED) * (_TRACED_WARMUP + _TRACED_ROUNDS) * scale.round_s,
        lab=_links(scale),
        records_in="directory",
    )


def _compared(
    scale: Scale,
    name: str,
    deliverables: tuple[str, ...],
    strategies: tuple[StrategyName, ...],
    sizes: tuple[str, ...],
) -> SuiteCase:
    # Figures that were warmed up differently are not laid side by side.
    warmup = _AUTO_WARMUP if "auto" in scale.bucket_sizes else _WARMUP
    variants = tuple(_variants(strategies, sizes))
    return SuiteCase(
        name=name,
        deliverables=deliverables,
        arguments=(
            *("bench", "ddp", *_parallel_flags(scale), "--strategies", *strategies),
            *("--bucket-size-mb", *sizes, *words("--warmup", warmup, "--rounds", scale.rounds)),
        ),
        expected=tuple(
            Expected(
                kind="ddp",
                fields={
                    **_parallel_fields(scale),
                    "strategy": strategy,
                    "bucket_size_mb": size,
                    "warmup": warmup,
                    "rounds": scale.rounds,
                },
            )
            for strategy, size in variants
        ),
        seconds=scale.seconds + len(variants) * (warmup + scale.rounds) * scale.round_s,
        lab=_links(scale),
    )


def _links(scale: Scale) -> tuple[str, ...]:
    return ("--hosts", "2", "--rate", _OVERLAP_RATE) if scale.lab_rates else ()


def _parallel_flags(scale: Scale) -> tuple[str, ...]:
    flags = words(
        *("--model", scale.parallel_model, "--batch", scale.parallel_batch),
        *("--context", CONTEXT, "--device", scale.device),
    )
    # On virtual hosts, the lab says how many ranks there are.
    return flags if scale.lab_rates else (*flags, "--world-size", str(scale.world_sizes[-1]))


def _parallel_fields(scale: Scale) -> dict[str, CaseValue]:
    place: dict[str, CaseValue] = {"num_hosts": 1, "world_size": scale.world_sizes[-1]}
    if scale.lab_rates:
        place = {"num_hosts": 2, "world_size": 2, LINK_RATE: RATES[_OVERLAP_RATE]}
    return {
        "model": scale.parallel_model,
        "batch": scale.parallel_batch,
        "context": CONTEXT,
        "precision": "float32",
        "compile": "none",
        "device": scale.device,
        **place,
    }


def _variants(
    strategies: tuple[StrategyName, ...], sizes: tuple[str, ...]
) -> Iterator[tuple[StrategyName, float | str | None]]:
    for strategy in strategies:
        if strategy not in BUCKET_STRATEGIES:
            yield strategy, None
            continue
        for size in sizes:
            if size != "auto":
                yield strategy, float(size)
            elif strategy == "bucketed":
                yield strategy, size


def sharding_cases(scale: Scale) -> Iterator[SuiteCase]:
    """Yields the memory of steps by what it holds, with and without sharding."""
    yield SuiteCase(
        name="sharding",
        deliverables=("optimizer_state_sharding",),
        arguments=(
            *("bench", "memory", "--model", scale.sharded_model, "--device", scale.device),
            *("--world-size", str(scale.sharded_ranks), "--strategies", *scale.sharded),
            *("--warmup", "1", "--steps", "3"),
        ),
        expected=tuple(
            Expected(
                kind="optimizer",
                fields={
                    "strategy": strategy,
                    "model": scale.sharded_model,
                    "device": scale.device,
                    "world_size": scale.sharded_ranks,
                    "precision": "float32",
                    "compile": "none",
                },
            )
            for strategy in scale.sharded
        ),
        seconds=1.5 * len(scale.sharded) * scale.seconds,
    )
