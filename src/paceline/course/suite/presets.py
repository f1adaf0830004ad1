"""The suites: which commands measure what a report needs.

Every case is built together with the records that it will leave, from the same values, so that the
two cannot part.
"""

import itertools
from collections.abc import Iterator

from paceline.core.units import parse_bytes
from paceline.course.suite.parallel_presets import parallel_cases, sharding_cases
from paceline.course.suite.scales import CONTEXT, RATES, PresetName, Scale, find_scale, flag, words
from paceline.records import CaseValue
from paceline.records.kinds import LINK_RATE
from paceline.workflows.cases import Expected, SuiteCase

_KERNELS: dict[str, CaseValue] = {
    "head_dim": 64,
    "mask": "causal",
    "lengths": "even",
    "group": 1,
}
"""One variant of every kernel: the usual one of training."""
_BATCH = 4
_NAIVE_BATCH = 8


def suite_cases(preset: PresetName, *, quick: bool = False) -> tuple[SuiteCase, ...]:
    """Returns the cases of a preset in the order of the report.

    Args:
        preset: The kind of machine.
        quick: Smaller models, fewer sizes and fewer samples.
    """
    scale = find_scale(preset, quick=quick)
    return (
        *_step_cases(scale),
        *_profile_cases(scale),
        *_attention_cases(scale),
        *_communication_cases(scale),
        *parallel_cases(scale),
        *sharding_cases(scale),
    )


def _step_cases(scale: Scale) -> Iterator[SuiteCase]:
    samples: dict[str, CaseValue] = {"warmup": scale.step_warmup, "steps": scale.steps}
    flags = words(*("--warmup", scale.step_warmup, "--steps", scale.steps))
    common = ("bench", "step", "--device", scale.device)
    for model, seconds in scale.models.items():
        yield SuiteCase(
            name=f"step-{model}",
            deliverables=("benchmarking_script", "benchmarking_mixed_precision"),
            arguments=(*common, "--model", model, "--precision", "float32", "bfloat16", *flags),
            expected=tuple(
                _step(scale, model, **samples, precision=precision)
                for precision in ("float32", "bfloat16")
            ),
            seconds=seconds,
        )
    model = scale.small_model
    yield SuiteCase(
        name="step-warmup",
        deliverables=("benchmarking_script",),
        arguments=(
            *(*common, "--model", model, "--warmup", "0", "1", "2", "5"),
            *("--steps", str(scale.steps)),
        ),
        expected=tuple(
            _step(scale, model, steps=scale.steps, warmup=warmup) for warmup in (0, 1, 2, 5)
        ),
        seconds=2 * scale.seconds,
    )
    yield SuiteCase(
        name="step-compile",
        deliverables=("torch_compile",),
        arguments=(*common, "--model", model, "--compile", *flags),
        expected=(_step(scale, model, **samples, compile="whole"),),
        seconds=3 * scale.seconds,
    )
    context = scale.contexts[0]
    yield SuiteCase(
        name="step-naive",
        deliverables=("nsys_profile",),
        arguments=(
            *(*common, "--model", model, "--attention", "naive", "--context", str(context)),
            *("--phase", "forward", "train", *flags),
        ),
        expected=tuple(
            _step(scale, model, **samples, attention="naive", context=context, phase=phase)
            for phase in ("forward", "train")
        ),
        seconds=2 * scale.seconds,
    )


def _step(scale: Scale, model: str, **fields: CaseValue) -> Expected:
    usual: dict[str, CaseValue] = {
        "precision": "float32",
        "compile": "none",
        "phase": "train",
        "batch": _BATCH,
        "context": CONTEXT,
    }
    return Expected(kind="step", fields={**usual, "model": model, "device": scale.device, **fields})


def _profile_cases(scale: Scale) -> Iterator[SuiteCase]:
    traced = [(scale.contexts[0], "forward", "float32")]
    traced += [(context, "train", "float32") for context in scale.contexts]
    traced += [(scale.contexts[0], "train", "bfloat16")]
    for context, phase, precision in traced:
        fields: dict[str, CaseValue] = {
            "model": scale.small_model,
            "batch": _BATCH,
            "context": context,
            "phase": phase,
            "precision": precision,
        }
        yield SuiteCase(
            name=f"profile-{phase}-{context}-{precision}",
            deliverables=("nsys_profile", "memory_profiling"),
            arguments=(
                *("profile", "step", "--device", scale.device, "--attention", "naive"),
                *(word for name, value in fields.items() for word in (flag(name), str(value))),
                *("--warmup", "2", "--steps", "2"),
            ),
            expected=(
                Expected(
                    kind="memory_timeline",
                    fields={
                        **fields,
                        "attention": "naive",
                        "compile": "none",
                        "device": scale.device,
                    },
                ),
            ),
            seconds=scale.seconds,
            records_in="directory",
        )


def _attention_cases(scale: Scale) -> Iterator[SuiteCase]:
    limit = ("--device", scale.device, "--time-limit-s", str(scale.attention_limit_s))
    naive: dict[str, CaseValue] = {
        "implementation": "naive",
        "causal": False,
        "batch": _NAIVE_BATCH,
    }
    for width in scale.attention_widths:
        lengths = scale.attention_lengths
        yield SuiteCase(
            name=f"attention-{width}",
            deliverables=("pytorch_attention", "torch_compile"),
            arguments=(
                *("bench", "attention", "--head-dim", str(width), "--context"),
                *(*words(*lengths), *limit),
            ),
            expected=tuple(
                _attention(scale, head_dim=width, context=length, **naive) for length in lengths
            ),
            seconds=len(lengths) * (3 + 2 * scale.attention_limit_s),
        )
        yield SuiteCase(
            name=f"attention-{width}-compiled",
            deliverables=("torch_compile",),
            arguments=(
                *("bench", "attention", "--compile", "--head-dim", str(width), "--context"),
                *(*words(*scale.compiled_lengths), *limit),
            ),
            expected=tuple(
                _attention(scale, head_dim=width, context=length, compile="whole", **naive)
                for length in scale.compiled_lengths
            ),
            seconds=len(scale.compiled_lengths) * (8 + 2 * scale.attention_limit_s),
        )
    for width, dtype in itertools.product(scale.flash_widths, ("float32", "bfloat16")):
        cases = list(itertools.product(scale.implementations, scale.flash_lengths))
        yield SuiteCase(
            name=f"flash-{width}-{dtype}",
            deliverables=("flash_benchmarking",),
            arguments=(
                *("bench", "attention", "--implementation", *scale.implementations),
                *("--batch", "1", "--causal", "--dtype", dtype, "--head-dim", str(width)),
                *("--context", *words(*scale.flash_lengths), *limit, "--warmup", "1"),
            ),
            expected=tuple(
                _attention(
                    scale,
                    implementation=implementation,
                    batch=1,
                    causal=True,
                    dtype=dtype,
                    head_dim=width,
                    context=length,
                )
                for implementation, length in cases
            ),
            seconds=len(cases) * (3 + 2 * scale.attention_limit_s),
        )
    yield SuiteCase(
        name="kernels",
        deliverables=("flash_forward, flash_backward",),
        arguments=(
            *("bench", "kernels", "--architecture", *scale.architectures),
            *(word for name, value in _KERNELS.items() for word in (flag(name), str(value))),
        ),
        expected=tuple(
            Expected(kind="kernel", fields={**_KERNELS, "architecture": name})
            for name in scale.architectures
        ),
        seconds=20 * len(scale.architectures),
    )


def _attention(scale: Scale, **fields: CaseValue) -> Expected:
    usual: dict[str, CaseValue] = {"dtype": "float32", "compile": "none", "device": scale.device}
    return Expected(kind="attention", fields={**usual, **fields})


def _communication_cases(scale: Scale) -> Iterator[SuiteCase]:
    common = ("bench", "comm", "--device", scale.device, "--steps", "10", "--time-limit-s", "5")
    for world_size in scale.world_sizes:
        yield SuiteCase(
            name=f"all-reduce-{world_size}",
            deliverables=("distributed_communication_single_node",),
            arguments=(*(*common, "--world-sizes", str(world_size), "--sizes", *scale.messages),),
            expected=_all_reduces(scale, scale.messages, world_size=world_size, num_hosts=1),
            seconds=3 * world_size + 2 * len(scale.messages),
        )
    sizes = tuple(size for size in scale.messages if size != "1GB")
    for rate in scale.lab_rates:
        yield SuiteCase(
            name=f"all-reduce-{rate}",
            deliverables=("distributed_communication_single_node",),
            arguments=(*common, "--sizes", *sizes),
            expected=_all_reduces(scale, sizes, num_hosts=2, **{LINK_RATE: RATES[rate]}),
            seconds=20,
            lab=("--hosts", "2", "--rate", rate),
        )


def _all_reduces(scale: Scale, sizes: tuple[str, ...], **fields: CaseValue) -> tuple[Expected, ...]:
    usual: dict[str, CaseValue] = {"operation": "all_reduce", "device": scale.device}
    return tuple(
        Expected(kind="comm", fields={**usual, "size_bytes": parse_bytes(size), **fields})
        for size in sizes
    )
