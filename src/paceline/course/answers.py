"""A question of the courses, and an answer: tables, pictures, and sentences over their numbers.

A sentence is a template over the numbers of records. Nothing in it depends on how a comparison
turns out: numbers stand side by side, and one that the records do not have reads "unknown".
"""

import dataclasses
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

from paceline.core.errors import HardwareError
from paceline.core.finding import Finding
from paceline.core.hardware import Device, find_device
from paceline.core.specs import DType
from paceline.core.units import format_binary_bytes, format_decimal, format_seconds
from paceline.records import CaseValue, Metric, Record
from paceline.reports.comparison import Ratio, compare
from paceline.reports.document import Block, draw_picture
from paceline.reports.fields import model_name, strategy_text
from paceline.reports.record_sets import RecordSet, describe_environments, describe_topology
from paceline.reports.tables.table import Table, records_table

Numbers: TypeAlias = Mapping[str, CaseValue | Ratio]
"""Numbers and names of a sentence; units are in their names, such as ``peak_bytes``."""
Row: TypeAlias = tuple[str, Numbers]
"""The name of a sentence of the question, and what to fill it with."""

_RATES = {"flops_per_s": "FLOP/s", "bytes_per_s": "B/s"}
_LARGEST_COUNT = 1e9
"""Counts of at least this are written with an exponent."""


class Answer(NamedTuple):
    """An answer from one group of comparable records or from a calculation."""

    block: Block
    """The tables, with the hardware as heading and the environments as footer; no sentences."""
    rows: Sequence[Row]
    drawn: Mapping[str, Sequence[Record]] = {}
    """The records of each plot of the question; none draws nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One question of a deliverable."""

    deliverable: str
    title: str
    asks: str
    finds: Callable[[RecordSet], Iterable[Answer]]
    """Finds the records and numbers of the answers, one per machine that has records."""
    says: str
    """The sentence that answers it: a template, named like the function that finds its numbers."""
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further sentences by name, for a question that asks several things."""
    kind: str | None = None
    """The kind of record that the answer needs; None if it is calculated."""

    def answer(self, record_set: RecordSet) -> tuple[Block, ...]:
        """Returns the blocks of the answer; none without records."""
        blocks = []
        for number, (block, rows, drawn) in enumerate(self.finds(record_set)):
            if not rows:
                continue
            pictures = tuple(
                draw_picture(
                    plot, records, f"{self._slug}-{number}-{plot}", f"{self.title}: {plot}"
                )
                for plot, records in drawn.items()
            )
            found = tuple(fill(name, self.sentences[name], numbers) for name, numbers in rows)
            pictures, findings = (*block.pictures, *pictures), (*found, *block.findings)
            blocks.append(dataclasses.replace(block, pictures=pictures, findings=findings))
        return tuple(blocks)

    @property
    def sentences(self) -> dict[str, str]:
        """All sentences by name."""
        return {self.finds.__name__: self.says, **self.also}

    @property
    def _slug(self) -> str:
        return f"{self.deliverable} {self.title}".replace(",", "").replace(" ", "-").lower()


def measured_answer(
    group: Sequence[Record],
    rows: Iterable[Row],
    plots: Mapping[str, Sequence[Record]] | Sequence[str] = (),
    tables: Iterable[Table] | None = None,
) -> Answer:
    """Returns the answer of a group; by default, its plots and its table show all its records."""
    block = Block(
        heading=describe_topology(group[0]),
        tables=(records_table(group),) if tables is None else tuple(tables),
        environments=describe_environments(group),
    )
    drawn = plots if isinstance(plots, Mapping) else dict.fromkeys(plots, group)
    return Answer(block, tuple(rows), drawn)


def row(name: str, *found: Numbers, **more: CaseValue | Ratio) -> Row:
    """Returns the numbers of one sentence; where names collide, later ones count."""
    return name, {key: value for numbers in (*found, more) for key, value in numbers.items()}


def numbers_of(record: Record | None, prefix: str = "") -> Numbers:
    """Returns the case and the metrics of a record under their names, each after `prefix`."""
    if record is None:
        return {}
    found = {**record.case, **{name: metric.value for name, metric in record.metrics.items()}}
    if "model" in record.case:
        found["model"] = model_name(record)
    if "bucket_size_mb" in record.case:
        found["strategy"] = strategy_text(record)
    return {f"{prefix}{name}": value for name, value in found.items()}


def fill(name: str, template: str, numbers: Numbers) -> Finding:
    """Returns a finding whose message is the template filled with the numbers.

    A number is formatted by the unit in its name, unless its field has a format such as
    ``{result:.4f}``. The numbers in the message become the figures of the finding.
    """
    figures: dict[str, float] = {}
    texts: dict[str, object] = {}
    for key in (field for _text, field, *_ in string.Formatter().parse(template) if field):
        value = numbers.get(key)
        if isinstance(value, Ratio):
            figures |= {key: value.value, f"{key}_low": value.low, f"{key}_high": value.high}
            ends = f"interval {value.low:.3g} to {value.high:.3g}, samples: {value.num_samples}"
            texts[key] = f"{value.value:.3g} times ({ends})"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            figures[key] = value
            texts[key] = _Figure(key, value)
        else:
            texts[key] = "unknown" if value is None else str(value)
    return Finding(name=name, message=template.format(**texts), figures=figures)


class _Figure(NamedTuple):
    name: str
    value: float

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else _format_figure(self.name, self.value)


def _format_figure(name: str, value: float) -> str:
    for suffix, unit in _RATES.items():
        if name.endswith(suffix):
            return format_decimal(value, unit)
    if name.endswith("_s"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_binary_bytes(value)
    if name.endswith("share"):
        return f"{value:.0%}"
    if value == round(value) and abs(value) < _LARGEST_COUNT:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def pairs_with_base(
    records: Sequence[Record], field: str, base: CaseValue, key: Callable[[Record], object]
) -> list[tuple[Record, Record]]:
    """Pairs each measured record with the one of the same key whose `field` is `base`."""
    measured = [record for record in records if record.metrics]
    bases = {key(record): record for record in measured if record.case[field] == base}
    return [
        (record, bases[key(record)])
        for record in measured
        if record.case[field] != base and key(record) in bases
    ]


def both_passes(record: Record) -> Metric:
    """Returns the time of forward plus backward; the sum of both if they were timed apart."""
    both = record.metrics.get("both_time_s")
    if both is not None:
        return both
    passes = [record.metrics[f"{name}_time_s"] for name in ("forward", "backward")]
    samples = [sum(pair) for pair in zip(*(each.samples for each in passes), strict=False)]
    return Metric.from_samples(samples or [sum(each.value for each in passes)])


def compare_passes(subject: Record, baseline: Record) -> Ratio | None:
    """Compares forward plus backward of two cases that did not run interleaved."""
    return compare(both_passes(subject), both_passes(baseline))


def peak_flops(record: Record, dtype: str) -> float | None:
    """Returns the device's peak FLOP/s in a dtype; the TF32 peak if float32 matmuls may use it."""
    if dtype == "float32" and record.case["float32_matmul_precision"] != "highest":
        dtype = "tfloat32"
    return data_sheet(record, lambda device: device.peak(cast(DType, dtype)).value)


def data_sheet(record: Record, look_up: Callable[[Device], float]) -> float | None:
    """Looks up a value of the device of a record; None for unknown devices."""
    try:
        return look_up(find_device(str(record.case["hardware"])))
    except HardwareError:
        return None
