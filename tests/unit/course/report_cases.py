"""Committed and synthetic records for tests of reports, and checks of their sentences."""

import functools
import pathlib
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from paceline.core.finding import Finding
from paceline.course.answers import Question
from paceline.course.questions import QUESTIONS
from paceline.records import Metric, Record, RecordStore, find_kind, latest_per_case
from paceline.reports.document import Block
from paceline.reports.record_sets import RecordSet
from tests.unit import record_factory

RESULTS = pathlib.Path(__file__).parents[3] / "results"
STEADY = (1.0, 0.999, 1.001, 1.0, 1.0, 1.0, 1.0)
NOISY = (0.8, 1.3, 1.0, 0.7, 1.1, 0.9, 1.2)
ONE = (1.0,)
FEW = "samples: 1)"
GPU = {"device": "cuda", "hardware": "h100-sxm", "backend": "nccl"}
UNSHAPED = {"num_hosts": 2, "measured_link_rate_bits_per_s": 2e10}
"""Two hosts on a link without a configured rate."""


@functools.cache
def committed_records() -> tuple[Record, ...]:
    """Returns all committed records, plus synthetic compiled cases, which are not committed."""
    records = [
        record for path in sorted(RESULTS.glob("*.jsonl")) for record in RecordStore(path).read()
    ]
    naive = {"implementation": "naive", "causal": False}
    plain = RecordSet.of(records).find("step", phase="train")
    plain += RecordSet.of(records).find("attention", **naive)
    compiled = [changed(record, 0.8, compile="whole") for record in plain if record.metrics]
    return tuple(latest_per_case([*records, *compiled]))


def changed(record: Record, factor: float, **case: Any) -> Record:
    """Returns the record with every metric multiplied by `factor` and some case fields changed."""
    metrics = {
        name: Metric.from_samples([value * factor for value in metric.samples or (metric.value,)])
        for name, metric in record.metrics.items()
    }
    return msgspec.structs.replace(record, case={**record.case, **case}, metrics=metrics)


def swapped(records: tuple[Record, ...], order: Callable[[list[int]], list[int]]) -> list[Record]:
    """Returns the same cases, with the metrics of each kind reordered."""
    result = list(records)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, record in enumerate(records):
        if record.metrics:
            groups.setdefault((record.kind, *sorted(record.metrics)), []).append(index)
    for indices in groups.values():
        for index, other in zip(indices, order(indices), strict=True):
            result[index] = msgspec.structs.replace(records[index], metrics=records[other].metrics)
    return result


def make_record(kind: str, numbers: Mapping[str, Any], **case: Any) -> Record:
    """Returns a record of the numbers that are not None, by default on two ranks of a CPU."""
    known = {name: number for name, number in numbers.items() if number is not None}
    usual = {"world_size": 2, "num_hosts": 1, "threads": 1, "device": "cpu"}
    usual |= {"hardware": "a processor"}
    fields = find_kind(case.get("predicts", kind)).join_key
    case = {name: value for name, value in usual.items() if name in fields} | case
    return record_factory.make_record(kind, known, **case)


def question_of(finds: object) -> Question:
    """Returns the question that a function finds the answers to."""
    (question,) = [each for each in QUESTIONS if each.finds is finds]
    return question


def sentences(blocks: Sequence[Block]) -> list[str]:
    """Returns the text of all findings."""
    return [finding.text for block in blocks for finding in block.findings]


def check(
    finds: object, records: Sequence[Record], expected: Mapping[str, Mapping[str, Any] | None]
) -> tuple[Block, ...]:
    """Checks that a sentence of each name has these figures; None if there must be none.

    A figure of None must be unknown, and the key "says" has words that the sentence must contain.
    If nothing is expected, the answer must be empty. Returns the blocks of the answer.
    """
    question = question_of(finds)
    blocks = question.answer(RecordSet.of(records))
    assert expected or not blocks
    found = [finding for block in blocks for finding in block.findings]
    for name, figures in expected.items():
        named = [finding for finding in found if finding.name == name]
        assert bool(named) == (figures is not None), name
        fields = {field for _, field, *_ in string.Formatter().parse(question.sentences[name])}
        known = {key.removesuffix("_low").removesuffix("_high") for key in figures or {}}
        assert known <= {*fields, "says"}, known - fields
        matching = [finding for finding in named if _matches(finding, figures or {})]
        assert bool(matching) == bool(named), (figures, named)
    return blocks


def _matches(finding: Finding, expected: Mapping[str, Any]) -> bool:
    figures = dict(expected)
    says = figures.pop("says", ())
    if not all(words in finding.text for words in ((says,) if isinstance(says, str) else says)):
        return False
    known = {key: number for key, number in figures.items() if number is not None}
    if finding.figures.keys() & (figures.keys() - known):
        return False
    return {key: finding.figures.get(key) for key in known} == pytest.approx(known, rel=2e-3)
