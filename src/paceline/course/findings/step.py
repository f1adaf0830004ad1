"""What the times of training steps say: the longest phase, growth by size, what warm-up does."""

from collections.abc import Sequence

from paceline.accounting import flops_per_token
from paceline.core.device_table import find_device
from paceline.core.errors import HardwareError
from paceline.core.units import format_decimal, format_seconds
from paceline.course.findings.phrases import compare, listing, times
from paceline.records import Metric, Record
from paceline.reports.evidence.comparison import stands_out
from paceline.reports.evidence.fields import case_number
from paceline.reports.evidence.models import model_name, num_parameters, shape_of

PHASES = ("forward", "backward", "optimizer")
# AdamW reads weight, gradient and both moments, and writes all but the gradient.
_OPTIMIZER_BYTES = 7 * 4
_STEADY = 0.05
"""A spread below this share of the mean is small."""
_NOTICEABLE = 0.25
_FEWEST_SAMPLES = 3
"""One, and two that have a deviation."""


def seconds(record: Record, name: str) -> float:
    """Returns the median time of a phase, or of the step."""
    return record.metrics[f"{name}_time_s"].value


def is_timed(record: Record) -> bool:
    """Whether every phase of a step took a time that is known."""
    names = (f"{name}_time_s" for name in (*PHASES, "step"))
    return all(name in record.metrics and record.metrics[name].value > 0 for name in names)


def size_sentences(records: Sequence[Record]) -> list[str]:
    """Says how long each phase takes by model.

    Args:
        records: Steps with times, the smallest model first.
    """
    largest = records[-1]
    phases = {phase: seconds(largest, phase) for phase in PHASES}
    slowest = max(phases, key=lambda phase: phases[phase])
    total = sum(phases.values())
    return [
        f"{slowest.capitalize()} takes longest: of {model_name(largest)}'s "
        f"{format_seconds(total)} it takes {phases[slowest] / total:.0%} ("
        + ", ".join(f"{phase} {format_seconds(each)}" for phase, each in phases.items())
        + ").",
        *_backward_sentences(largest),
        _spread_sentence(records),
        *_growth_sentences(records[0], largest),
        *_optimizer_sentences(largest),
    ]


def _backward_sentences(record: Record) -> list[str]:
    ratio = seconds(record, "backward") / seconds(record, "forward")
    sentence = f"Backward takes {times(ratio)} as long as forward"
    shape, context = shape_of(record), record.case["context"]
    recomputed = record.case["activation_checkpointing"]
    if shape is None or not isinstance(context, int) or recomputed not in ("none", "full"):
        return [f"{sentence}."]
    flops = flops_per_token(
        shape, context, activation_checkpointing="full" if recomputed == "full" else "none"
    )
    expected = (flops.backward + flops.recomputation) / flops.forward
    error = ratio / expected - 1
    agrees = "agrees" if abs(error) <= _NOTICEABLE else "does not agree"
    again = ", forward inside of backward included," if flops.recomputation else ""
    return [
        f"{sentence}; counting products{again} gives {expected:.3g}, with which the measurement "
        f"{agrees} ({error:+.0%})."
    ]


def _spread_sentence(records: Sequence[Record]) -> str:
    spreads: list[tuple[float, str]] = []
    unknown: list[str] = []
    for record in records:
        step = record.metrics["step_time_s"]
        if step.std is None:
            unknown.append(model_name(record))
        else:
            spreads.append((step.std / (step.mean or step.value), model_name(record)))
    if not spreads:
        return "How much repeated steps differ is not known: that takes more than one sample."
    spread, model = max(spreads)
    size = (
        "small"
        if spread < _STEADY
        else "large: differences of that size say little without more samples"
    )
    rest = f"; that of {listing(unknown)} is not known" if unknown else ""
    return f"The largest standard deviation, {spread:.1%} of the mean ({model}), is {size}{rest}."


def _growth_sentences(first: Record, last: Record) -> list[str]:
    rates = [record.metrics.get("model_flops_per_s") for record in (first, last)]
    growth = num_parameters(last) / num_parameters(first)
    if growth == 1 or rates[0] is None or rates[1] is None or rates[0].value <= 0:
        return []
    before, after = rates[0].value, rates[1].value
    longer = seconds(last, "step") / seconds(first, "step")
    relation = compare(after, before, more="more", less="less")
    if after > before * (1 + _NOTICEABLE):
        meaning = (
            "the smaller model leaves more of the device unused, which a larger batch may mend"
        )
    elif after < before * (1 - _NOTICEABLE):
        meaning = "the larger model leaves more of the device unused"
    else:
        meaning = "time grows about as the work does"
    return [
        f"From {model_name(first)} to {model_name(last)} parameters grow {times(growth)} and the "
        f"step {times(longer)}; the rate, {format_decimal(after, 'FLOP/s')}, is {relation} the "
        f"smaller model's: {meaning}."
    ]


def _optimizer_sentences(record: Record) -> list[str]:
    if record.case["optimizer"] != "adamw":
        return []
    rate = _OPTIMIZER_BYTES * num_parameters(record) / seconds(record, "optimizer")
    text = (
        f"AdamW has to move {_OPTIMIZER_BYTES} bytes per parameter, so {model_name(record)}'s "
        f"optimizer moves {format_decimal(rate, 'B/s')}"
    )
    try:
        limit = find_device(str(record.case["hardware"])).memory_bytes_per_s.value
    except HardwareError:
        return [
            f"{text}; what this memory can move is not known here, so neither is whether it "
            "bounds the optimizer."
        ]
    if rate > limit:
        return [
            f"{text}, more than the memory's {format_decimal(limit, 'B/s')}: either the timer was "
            "not synchronised, or caches hold the states."
        ]
    return [f"{text}, {rate / limit:.0%} of the memory's {format_decimal(limit, 'B/s')}."]


def warmup_sentences(records: Sequence[Record]) -> list[str]:
    """Says what leaving out the warm-up does.

    Args:
        records: Steps that differ in the number of warm-up steps alone, the smallest number first.
    """
    cold, warm = (record.metrics["step_time_s"] for record in (records[0], records[-1]))
    before, after = (_warmup_text(record) for record in (records[0], records[-1]))
    return [
        *_first_sample_sentences(cold, before),
        _mean_sentence(cold, warm, before, after),
        "One or two warm-up steps are not always enough, because caches of memory and of compiled "
        "code fill over several steps; watch the samples, not a rule.",
    ]


def _first_sample_sentences(cold: Metric, before: str) -> list[str]:
    """Lays the first sample beside later ones of its own run: other runs may differ in all."""
    if len(cold.samples) < _FEWEST_SAMPLES:
        return []
    first, later = cold.samples[0], Metric.from_samples(cold.samples[1:])
    if later.value <= 0:
        return []
    outside = stands_out(first, later)
    if outside is None:
        meaning = f"of {len(later.samples)} more samples nothing is known of noise"
    elif not outside:
        meaning = "no further from it than others, so it cannot be told from noise"
    elif first < later.value:
        meaning = "no cost of a first step shows"
    else:
        meaning = "first steps also allocate, choose kernels and fill caches"
    return [
        f"After {before} the first sample takes {format_seconds(first)}, "
        f"{times(first / later.value)} the median of those that follow, "
        f"{format_seconds(later.value)}: {meaning}."
    ]


def _warmup_text(record: Record) -> str:
    count = case_number(record, "warmup")
    return f"{count:g} warm-up step{'' if count == 1 else 's'}"


def _mean_sentence(cold: Metric, warm: Metric, before: str, after: str) -> str:
    medians = [format_seconds(metric.value) for metric in (cold, warm)]
    if cold.mean is None or cold.std is None or warm.mean is None or warm.std is None:
        return (
            f"The median is {medians[0]} after {before} and {medians[1]} after {after}; what "
            "happens to the deviation is not known, that takes more than one sample of each."
        )
    moves_less = abs(cold.value - warm.value) < abs(cold.mean - warm.mean)
    return (
        f"The mean with its deviation is {format_seconds(cold.mean)} ± {format_seconds(cold.std)} "
        f"after {before} and {format_seconds(warm.mean)} ± {format_seconds(warm.std)} after "
        f"{after}; the median, {medians[0]} and {medians[1]}, moves "
        f"{'less' if moves_less else 'no less'} than the mean."
    )
