"""Records that a report can be made of: those that are committed, and a few that are not."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.records import Metric, Record, RecordStore, latest_per_case
from paceline.reports.document.model import Block, Picture

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


def sentences(blocks: tuple[Block, ...]) -> list[str]:
    """All commentary."""
    return [sentence for block in blocks for sentence in block.findings]
