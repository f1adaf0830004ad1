"""Findings about step times: phases, model sizes, warm-up, precision, compilation."""

from collections.abc import Iterator, Sequence

from paceline.accounting import flops_per_token
from paceline.core.finding import Finding
from paceline.core.specs import precision_preset
from paceline.course.findings.devices import memory_bandwidth, peak_flops
from paceline.course.findings.pairs import compare_passes, pairs_with_base
from paceline.course.findings.template import ALIKE, against, make_finding, standing
from paceline.records import Metric, Record
from paceline.reports.evidence.comparison import compare, stands_out
from paceline.reports.evidence.fields import case_number
from paceline.reports.evidence.models import model_key, model_name, num_parameters, shape_of

PHASES = ("forward", "backward", "optimizer", "step")
# AdamW reads weight, gradient and both moments, and writes all but the gradient.
_OPTIMIZER_BYTES = 7 * 4
_SLOWER = "the first is slower than all later ones"


def seconds(record: Record, name: str) -> float:
    """Returns the median time of a phase or of the whole step."""
    return record.metrics[f"{name}_time_s"].value


def size_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields findings on phase times by model.

    `records` must be sorted by model size and may contain failures.
    """
    measured = [record for record in records if record.metrics]
    first, last = measured[0], measured[-1]
    yield _longest_phase(last)
    yield from _backward_to_forward(last)
    yield _largest_spread(measured)
    if num_parameters(first) < num_parameters(last):
        yield _rate_by_size(first, last)
    if last.case["optimizer"] == "adamw":
        yield _optimizer_bandwidth(last)


def _longest_phase(record: Record) -> Finding:
    times = {f"{phase}_time_s": seconds(record, phase) for phase in PHASES}
    longest = max(PHASES[:-1], key=lambda phase: seconds(record, phase))
    return make_finding(
        f"{longest}_takes_longest",
        "A training step of {model} takes {step_time_s}: forward {forward_time_s}, backward "
        "{backward_time_s}, optimizer {optimizer_time_s}. The longest phase is {longest}, {share} "
        "of the step.",
        model=model_name(record),
        longest=longest,
        share=seconds(record, longest) / seconds(record, "step"),
        **times,
    )


def _backward_to_forward(record: Record) -> Iterator[Finding]:
    shape, context = shape_of(record), int(case_number(record, "context"))
    if shape is None:
        return
    recomputed = record.case["activation_checkpointing"] == "full"
    flops = flops_per_token(
        shape, context, activation_checkpointing="full" if recomputed else "none"
    )
    ratio = seconds(record, "backward") / seconds(record, "forward")
    expected = (flops.backward + flops.recomputation) / flops.forward
    yield make_finding(
        "backward_to_forward",
        "Backward takes {ratio} times as long as forward; the ratio of their FLOPs is "
        "{expected_ratio}: {verdict}.",
        ratio=ratio,
        expected_ratio=expected,
        verdict=against(ratio, expected),
    )


def _largest_spread(records: Sequence[Record]) -> Finding:
    """Returns the largest relative spread of any phase and model, so that none is averaged away."""
    spread, phase, model = max(
        ((metric.std or 0.0) / metric.value, phase, model_name(record))
        for record in records
        for phase in PHASES
        if (metric := record.metrics[f"{phase}_time_s"])
    )
    if not spread:
        return make_finding("spread_unknown", "With one sample there is no standard deviation.")
    return make_finding(
        "largest_spread",
        "The largest standard deviation is {spread_share} of the median: {phase} of {model}.",
        "Measure more steps before comparing phases." if spread > ALIKE else "",
        spread_share=spread,
        phase=phase,
        model=model,
    )


def _rate_by_size(first: Record, last: Record) -> Finding:
    before, after = (each.metrics["model_flops_per_s"].value for each in (first, last))
    grows = standing(after, before) == "more"
    return make_finding(
        "rate_by_size",
        "From {first} to {last}, the number of parameters grows {parameter_ratio} times and step "
        "time {step_time_ratio} times; throughput goes from {first_flops_per_s} to "
        "{last_flops_per_s}: {verdict}.",
        "The smaller model leaves more of the device unused: try a larger batch." if grows else "",
        first=model_name(first),
        last=model_name(last),
        parameter_ratio=num_parameters(last) / num_parameters(first),
        step_time_ratio=seconds(last, "step") / seconds(first, "step"),
        first_flops_per_s=before,
        last_flops_per_s=after,
        verdict=against(after, before),
    )


def _optimizer_bandwidth(record: Record) -> Finding:
    rate = _OPTIMIZER_BYTES * num_parameters(record) / seconds(record, "optimizer")
    limit = memory_bandwidth(record)
    is_possible = limit is None or rate <= limit
    return make_finding(
        "optimizer_bandwidth" if is_possible else "optimizer_exceeds_memory_bandwidth",
        "AdamW moves 28 bytes per parameter, so the optimizer of {model} reaches "
        "{optimizer_bytes_per_s}; the device's memory bandwidth is {memory_bytes_per_s}.",
        "" if is_possible else "Synchronise the timer, or use a model too large for the caches.",
        model=model_name(record),
        optimizer_bytes_per_s=rate,
        memory_bytes_per_s=limit,
    )


def warmup_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields the effect of warm-up; `records` must be sorted by number of warm-up steps."""
    measured = [record for record in records if record.metrics]
    yield from _first_step(measured[0])
    for record in measured:
        step = record.metrics["step_time_s"]
        yield make_finding(
            "step_time_after_warmup",
            "Warm-up steps: {num_warmup}. The mean step time is {mean_s} ± {std_s}, the median "
            "{median_s}.",
            num_warmup=case_number(record, "warmup"),
            mean_s=step.mean,
            std_s=step.std,
            median_s=step.value,
        )


def _first_step(record: Record) -> Iterator[Finding]:
    """Compares the first sample with later ones of the same run; other runs are not comparable."""
    first, *others = record.metrics["step_time_s"].samples or (0.0,)
    if not others:
        return
    later = Metric.from_samples(others)
    is_apart = stands_out(first, later)
    verdict = "the first is within the range of the later ones"
    if is_apart is None:
        verdict = "too few steps to judge"
    elif is_apart:
        verdict = _SLOWER if first > later.value else "the first is faster than all later ones"
    yield make_finding(
        "first_step",
        "After {num_warmup} warm-up steps, the first step takes {first_step_time_s} and the "
        "{num_later} later steps take {later_low_s} to {later_high_s}: {verdict}.",
        "Leave the first step out: it also allocates memory and fills caches."
        if verdict == _SLOWER
        else "",
        num_warmup=case_number(record, "warmup"),
        first_step_time_s=first,
        num_later=len(others),
        later_low_s=min(others),
        later_high_s=max(others),
        verdict=verdict,
    )


def precision_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields the speedup of bf16 and fp16 over fp32, by model."""
    for record, base in pairs_with_base(records, "precision", "float32", model_key):
        precision = str(record.case["precision"])
        half = peak_flops(record, precision_preset(precision).compute)
        full = peak_flops(record, "float32")
        yield make_finding(
            f"{precision}_to_float32",
            "Forward and backward of {model} take {ratio} as long in {precision} as in float32; "
            "the ratio of the device's {precision} and float32 peaks is {peak_ratio}. The "
            "optimizer stays in float32 and takes {optimizer_share} of the step instead of "
            "{float32_optimizer_share}.",
            model=model_name(record),
            precision=precision,
            ratio=compare_passes(record, base),
            peak_ratio=None if half is None or full is None else half / full,
            optimizer_share=seconds(record, "optimizer") / seconds(record, "step"),
            float32_optimizer_share=seconds(base, "optimizer") / seconds(base, "step"),
        )


def compile_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields the speedup of each compiled model over the same model in eager mode."""
    for record, base in pairs_with_base(records, "compile", "none", model_key):
        yield make_finding(
            "compiled_to_plain_step",
            "Compiled ({mode}), a step of {model} takes {step_time_s} instead of "
            "{plain_step_time_s}, {ratio} as long; forward alone takes {forward_ratio} times as "
            "long.",
            mode=str(record.case["compile"]),
            model=model_name(record),
            step_time_s=seconds(record, "step"),
            plain_step_time_s=seconds(base, "step"),
            ratio=compare(record.metrics["step_time_s"], base.metrics["step_time_s"]),
            forward_ratio=seconds(record, "forward") / seconds(base, "forward"),
        )
