"""Records that a report can be made of: those that are committed, and a few that are not."""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from paceline.records import Metric, Record, RecordStore, find_kind, latest_per_case
from paceline.reports.document.model import Block, Picture, finding_text
from tests.unit.record_factory import ENVIRONMENT

RESULTS = pathlib.Path(__file__).parents[3] / "results"


@functools.cache
def committed_records() -> tuple[Record, ...]:
    """All committed records, with compiled cases beside them, of which none are committed."""
    records = [
        record for path in sorted(RESULTS.glob("*.jsonl")) for record in RecordStore(path).read()
    ]
    steps = [each for each in records if each.kind == "step" and each.case["phase"] == "train"]
    naive = [
        each
        for each in records
        if each.kind == "attention"
        and each.case["implementation"] == "naive"
        and not each.case["causal"]
    ]
    compiled = [changed(each, 0.8, compile="whole") for each in (*steps, *naive) if each.metrics]
    return tuple(latest_per_case([*records, *compiled]))


def changed(record: Record, factor: float, **case: Any) -> Record:
    """The record with every figure multiplied, and another case."""
    metrics = {
        name: Metric.from_samples([value * factor for value in metric.samples or (metric.value,)])
        for name, metric in record.metrics.items()
    }
    return msgspec.structs.replace(record, case={**record.case, **case}, metrics=metrics)


def swapped(records: tuple[Record, ...], order: Callable[[list[int]], list[int]]) -> list[Record]:
    """The same cases, with the figures of every kind handed out in another order."""
    result = list(records)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, record in enumerate(records):
        key = (record.kind, *sorted(record.metrics))
        if record.metrics:
            groups.setdefault(key, []).append(index)
    for indices in groups.values():
        for index, other in zip(indices, order(indices), strict=True):
            result[index] = msgspec.structs.replace(records[index], metrics=records[other].metrics)
    return result


def no_drawing(_plot: Any, _records: Any, name: str, description: str) -> Picture:
    """Stands in for drawing, which takes most of a report's time."""
    return Picture(name=name, description=description, svg=b"<svg/>")


def make_record(
    kind: str, metrics: Mapping[str, float | Sequence[float]], *, outcome: Any = "ok", **case: Any
) -> Record:
    """A record of numbers or of samples, on two ranks of a processor unless the case says more."""
    fields: dict[str, Any] = dict.fromkeys(find_kind(case.get("predicts", kind)).join_key, "x")
    usual = {"world_size": 2, "num_hosts": 1, "threads": 1, "device": "cpu"}
    usual |= {"hardware": "a processor"}
    fields |= {name: value for name, value in usual.items() if name in fields}
    return Record(
        kind=kind,
        case={**fields, **case},
        environment=ENVIRONMENT,
        metrics={
            name: Metric.from_samples(list(value))
            if isinstance(value, Sequence)
            else Metric(value=value)
            for name, value in metrics.items()
        },
        outcome=outcome,
        reason=None if outcome == "ok" else "a reason",
    )


def sentences(blocks: tuple[Block, ...]) -> list[str]:
    """All findings as text."""
    return [finding_text(finding) for block in blocks for finding in block.findings]


def check(blocks: Sequence[Block], expected: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Every finding has these figures, and its text these words; None for what must be absent.

    The key "says" is for words: a verdict, a name; "remedy" for all that is to be done.
    """
    found = {each.name: each for block in blocks for each in block.findings}
    for name, figures in expected.items():
        if figures is None:
            assert name not in found
            continue
        finding = found[name]
        says = figures.get("says", ())
        for words in (says,) if isinstance(says, str) else says:
            assert words in finding_text(finding)
        assert finding.remedy == figures.get("remedy", finding.remedy)
        known = {key: value for key, value in figures.items() if key not in ("says", "remedy")}
        assert {key: finding.figures[key] for key in known} == pytest.approx(known, rel=2e-3)
