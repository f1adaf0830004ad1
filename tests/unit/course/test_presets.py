"""Tests that a suite's commands write the records by which completed cases are recognized."""

import itertools
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.accounting import count_parameters
from paceline.benchmarks.config import (
    CollectiveSweep,
    DataParallelSweep,
    KernelSweep,
    OptimizerSweep,
)
from paceline.cli.bench import SweepCommand
from paceline.cli.main import parse
from paceline.core import BatchShape, model_preset
from paceline.core.units import GB
from paceline.course.presets import find_scale, suite_cases
from paceline.course.questions import QUESTIONS

PRESETS: Any = list(itertools.product(("laptop", "2gpu", "8gpu"), (False, True)))
RATES = {"200mbit": 2e8, "1gbit": 1e9, "2gbit": 2e9}
# Fields that are known only where or after the command runs.
ELSEWHERE = {"num_hosts", "link_rate_bits_per_s"}


def _fields(case: Any) -> dict[str, Any]:
    """Returns a case's fields, and those of its sweep, under the names that records use."""
    fields = {**vars(case.sweep), **case._asdict()}
    if isinstance(batch := fields.get("batch"), BatchShape):
        fields |= {"batch": batch.num_sequences, "context": batch.context_length}
    fields["compile"] = "whole" if fields.get("compile") else "none"
    if fields.get("compile_blocks"):
        fields["compile"] = "blocks"
    return fields


def _promised(sweep: Any) -> Iterator[dict[str, Any]]:
    """Yields the fields of a command's records, as far as its flags determine them."""
    for case in sweep.cases():
        match sweep:
            case DataParallelSweep():
                ranks = {"rounds": case.step.sweep.steps, "world_size": sweep.world_size or 2}
                for variant in case.variants:
                    yield {**_fields(case.step), **vars(variant), **ranks}
            case OptimizerSweep():
                ranks = {"world_size": sweep.world_size}
                yield {**_fields(case.step), **vars(case.variant), **ranks}
            case CollectiveSweep():
                for world_size in sweep.world_sizes or (2,):
                    yield {**_fields(case), "device": sweep.device, "world_size": world_size}
            case KernelSweep():
                yield case._asdict()
            case _:
                yield _fields(case)


@pytest.mark.parametrize(("preset", "quick"), PRESETS)
def test_every_command_leaves_the_records_that_it_is_known_by(preset: Any, quick: bool) -> None:
    cases = suite_cases(preset, quick=quick)
    for case in (each for each in cases if each.arguments[0] == "bench"):
        command = parse(shlex.split(shlex.join(case.arguments)))
        assert isinstance(command, SweepCommand)
        promised = list(_promised(command.sweep))
        for expected in case.expected:
            known = {name: expected[name] for name in expected.keys() - ELSEWHERE}
            assert any(known.items() <= each.items() for each in promised), (case.name, known)
    # No case is measured twice.
    assert len({case.name for case in cases}) == len({case.command for case in cases}) == len(cases)
    assert all(case.seconds > 0 and case.expected for case in cases)
    (warmed,) = [case for case in cases if case.name == "step-warmup"]
    assert [expected["warmup"] for expected in warmed.expected] == [0, 1, 2, 5]
    for case in (case for case in cases if case.rate):
        assert case.lab == ("--hosts", "2", "--rate", case.rate)
        links = {"num_hosts": 2, "link_rate_bits_per_s": RATES[case.rate]}
        assert all(links.items() <= expected.items() for expected in case.expected)
    measured = {(name, case.kind) for case in cases for name in case.deliverables}
    asked = {(question.deliverable, question.kind) for question in QUESTIONS if question.kind}
    assert measured >= asked


def test_gpus_hold_what_they_compare_and_a_quick_laptop_takes_a_quarter_of_an_hour() -> None:
    for preset, quick in PRESETS[2:]:
        model = model_preset(find_scale(preset, quick=quick).parallel_model)
        cases = suite_cases(preset, quick=quick)
        compared = [case for case in cases if case.arguments[:2] == ("bench", "ddp")]
        assert len(compared) == 2
        for case in compared:
            # Weights, gradients and two moments in float32, of every variant.
            assert len(case.expected) * 16 * count_parameters(model).total < 0.9 * 80 * GB
    assert sum(case.seconds for case in suite_cases("laptop", quick=True)) < 12 * 60
