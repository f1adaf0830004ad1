"""What steps of the same model say of each other: number formats, and compilation."""

from collections.abc import Mapping, Sequence

from paceline.core.device_table import find_device
from paceline.core.errors import HardwareError
from paceline.core.specs import DType, precision_preset
from paceline.core.units import format_seconds
from paceline.course.findings.phrases import listing, times
from paceline.course.findings.step import seconds
from paceline.records import CaseValue, Record
from paceline.reports.evidence.comparison import Standing, compare
from paceline.reports.evidence.models import model_key, model_name

_FULL = "float32"
_NOTICEABLE = 0.25


def pairs_with_base(
    records: Sequence[Record], field: str, base: CaseValue
) -> list[tuple[Record, Record]]:
    """Returns each record with the one of the same model that has the base value of a field."""
    bases = {model_key(each): each for each in records if each.case[field] == base}
    return [
        (record, bases[model_key(record)])
        for record in records
        if record.case[field] != base and model_key(record) in bases
    ]


def precision_sentences(records: Sequence[Record]) -> list[str]:
    """Says what sixteen bits gain over float32.

    Args:
        records: Steps with times that differ in model and format alone, the smallest model first.
    """
    by_format: dict[str, list[tuple[Record, Record]]] = {}
    for record, base in pairs_with_base(records, "precision", _FULL):
        by_format.setdefault(str(record.case["precision"]), []).append((record, base))
    sentences = []
    for name, pairs in by_format.items():
        gains = [_passes(base) / _passes(record) for record, base in pairs]
        told = listing(
            [
                f"{times(gain)} as fast for {model_name(record)}"
                for gain, (record, _base) in zip(gains, pairs, strict=True)
            ]
        )
        sentences.append(f"Forward and backward in {name} are {told}.")
        sentences.extend(_size_of_gain(name, gains, pairs[-1][0]))
        if len(pairs) > 1:
            first, last = (model_name(pairs[place][0]) for place in (0, -1))
            sentences.append(
                f"From {first} to {last} the gain goes from {gains[0]:.2f} to {gains[-1]:.2f}."
            )
        sentences.append(_optimizer_sentence(*pairs[-1]))
    return sentences


def _size_of_gain(name: str, gains: Sequence[float], record: Record) -> list[str]:
    sentences = []
    if max(gains) <= 1:
        sentences.append(f"{name} gains nothing here.")
    elif max(gains) < 1 + _NOTICEABLE:
        sentences.append(f"{name} gains little, {max(gains):.2f} at best.")
    possible = _peak_ratio(name, record)
    if possible is not None:
        sentences.append(
            f"By its peaks the device multiplies {times(possible)} as fast in {name}; casts, and "
            "whatever is not a product, do not gain from that."
        )
    return sentences


def _peak_ratio(name: str, record: Record) -> float | None:
    """Returns the device's peak in a format over that of its float32 products, where known."""
    rounds = record.case["float32_matmul_precision"] != "highest"
    full: DType = "tfloat32" if rounds else "float32"
    try:
        device = find_device(str(record.case["hardware"]))
        return device.peak(precision_preset(name).compute).value / device.peak(full).value
    except HardwareError:
        return None


def _optimizer_sentence(record: Record, base: Record) -> str:
    shares = [seconds(each, "optimizer") / seconds(each, "step") for each in (record, base)]
    return (
        f"The optimizer, which stays in {_FULL}, takes {shares[0]:.0%} of the step of "
        f"{model_name(record)} in {record.case['precision']} and {shares[1]:.0%} in {_FULL}."
    )


def _passes(record: Record) -> float:
    return seconds(record, "forward") + seconds(record, "backward")


_COMPILE_MEANINGS: Mapping[Standing, str] = {
    "less": "compiling fuses elementwise work, which saves passes over memory",
    "more": "what is fused does not pay for what compiling adds",
    "alike": "less than the samples differ among themselves, so neither is faster",
    "unknown": "of so few samples nothing is known of noise, so this may be no more",
}


def compile_sentence(record: Record, base: Record) -> str:
    """Says what compiling a model gains over leaving it as it is."""
    forward, step = (seconds(record, name) / seconds(base, name) for name in ("forward", "step"))
    ratio = compare(record.metrics["step_time_s"], base.metrics["step_time_s"])
    meaning = _COMPILE_MEANINGS["unknown" if ratio is None else ratio.standing]
    return (
        f"Compiled ({record.case['compile']}), {model_name(record)} takes {forward:.2f} times "
        f"the forward time and {step:.2f} times the step time "
        f"({format_seconds(seconds(record, 'step'))} after "
        f"{format_seconds(seconds(base, 'step'))}): {meaning}."
    )
