"""Tests that every problem is answered, and that sentences follow from the figures."""

import itertools
import json
import pathlib
import shlex
import string

import pytest

from paceline.cli import main
from paceline.course.answers import Question
from paceline.course.calculated import best_allocation
from paceline.course.presets import suite_cases
from paceline.course.questions import DELIVERABLES, QUESTIONS
from paceline.course.report import build_report, commands_for
from paceline.reports.record_sets import RecordSet
from paceline.scaling import synthetic_sweep
from tests.unit.course.report_cases import committed_records, question_of, sentences, swapped
from tests.unit.scaling.surfaces import SURFACE

# The courses' problems, in order.
CONTRACT = """
benchmarking_script, nsys_profile, mixed_precision_accumulation, benchmarking_mixed_precision,
memory_profiling, pytorch_attention, torch_compile, flash_forward, flash_backward,
flash_benchmarking, distributed_communication_single_node, naive_ddp, minimal_ddp_flat,
ddp_overlap_individual_parameters, ddp_overlap_bucketed, ddp_bucketed_benchmarking (equations),
communication_accounting, optimizer_state_sharding, chinchilla_isoflops
"""
pytestmark = pytest.mark.usefixtures("no_pictures")


def test_every_problem_has_a_section_in_order_and_every_question_an_answer_of_its_own() -> None:
    names = [name for deliverable in DELIVERABLES for name in deliverable.split(", ")]
    assert names == [name.strip() for name in CONTRACT.split(",")]
    assert list(dict.fromkeys(question.deliverable for question in QUESTIONS)) == [*DELIVERABLES]
    assert len({question.finds for question in QUESTIONS}) == len(QUESTIONS) == 27


def test_an_empty_store_leaves_the_right_calculations_and_commands_for_the_rest() -> None:
    report = build_report([])
    parts = [part for section in report.sections for part in section.parts]
    for part, question in zip(parts, QUESTIONS, strict=True):
        assert part.question == question.asks
        assert bool(part.blocks) == (question.kind is None) == (not part.commands), part.title
        assert len(part.commands) != 1, "only the command for GPUs"
        assert part.question.endswith("?")
        profiled = question.kind in ("memory_timeline", "timeline")
        for command in part.commands[:-1]:
            assert ("profile " in command) == profiled, part.title
    calculated = [part for part in parts if part.blocks]
    assert f"{len(calculated)} of {len(QUESTIONS)} questions" in report.summary[0]
    text = " ".join(sentence for part in parts for sentence in sentences(part.blocks))
    figures = """9.9531; 10.0021; 3,276 GiB; 41 H100; 17,547,264; 35 devices; 54; 25,302; 20,444;
        15,699; 3,925; s/(n w) + n o; 128.00 MiB; 29.78 GiB to 22.33 GiB; 5.00 MiB at context 128;
        float32, not float16"""
    assert [each.strip() for each in figures.split(";") if each.strip() not in text] == []


MEASURED = [
    pytest.param(question, id=f"{question.deliverable}: {question.title}")
    for question in QUESTIONS
    if question.kind
]


@pytest.mark.parametrize("question", MEASURED)
def test_sentences_change_with_the_figures_and_say_where_they_are_from(question: Question) -> None:
    records = committed_records()
    blocks = question.answer(RecordSet.of(records))
    assert sentences(blocks)
    for order in (lambda each: each[::-1], lambda each: each[3:] + each[:3]):
        changed = question.answer(RecordSet.of(swapped(records, order)))
        assert sentences(blocks) != sentences(changed)
    for found in blocks:
        assert found.tables
        assert found.environments
        assert all("torch 2" in place and "processors" in place for place in found.environments)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.title)
def test_every_name_in_a_sentence_is_one_that_its_records_have(question: Question) -> None:
    rows = [
        row for found in question.finds(RecordSet.of(committed_records())) for row in found.rows
    ]
    for name, sentence in question.sentences.items():
        fields = {field for _, field, *_ in string.Formatter().parse(sentence) if field}
        given = [numbers.keys() for row_name, numbers in rows if row_name == name]
        assert given, name
        assert fields <= set().union(*given), fields - set().union(*given)


def test_every_command_of_the_report_and_of_the_suite_is_one() -> None:
    presets = itertools.product(("laptop", "2gpu", "8gpu"), (False, True))
    cases = [case for preset, quick in presets for case in suite_cases(preset, quick=quick)]
    commands = {command for question in QUESTIONS for command in commands_for(question)}
    commands |= {f"{case.command}{' --out x' * (case.records_in == 'directory')}" for case in cases}
    parsed: list[object] = []
    for command in commands:
        lab, _, inner = command.rpartition(" -- ")
        for one in filter(None, (f"{lab} -- true" if lab else "", inner)):
            program, *arguments = shlex.split(one)
            assert program == "paceline"
            parsed.append(main.parse(arguments))
    assert len(parsed) >= len(commands) > 50


def test_scaling_laws_are_answered_for_the_runs_that_are_given(tmp_path: pathlib.Path) -> None:
    sweep = synthetic_sweep(SURFACE)
    runs = tmp_path / "runs.json"
    rows = zip(sweep.parameters, sweep.compute, sweep.loss, strict=True)
    names = ("parameters", "compute_budget", "final_loss")
    runs.write_text(json.dumps([dict(zip(names, map(float, row), strict=True)) for row in rows]))
    answer = question_of(best_allocation).answer
    (given,) = answer(RecordSet.of([], runs))
    assert "runs.json" in given.heading
    figures = [each.figures for each in given.findings[:2]]
    sizes = [each["parameters"] for each in figures]
    assert sizes == pytest.approx([3.351e10, 1.0942e11], rel=2e-3)
    assert figures[0]["tokens_per_parameter"] == pytest.approx(1e23 / 6 / sizes[0] ** 2, rel=1e-3)
    assert [each["extrapolation"] for each in figures] == pytest.approx(
        [compute / sweep.compute.max() for compute in (1e23, 1e24)]
    )
    (made_up,) = answer(RecordSet.of([]))
    assert "Synthetic" in made_up.heading
    assert made_up.findings[:2] != given.findings[:2]
