"""Tests that the report has every deliverable, and that findings follow from the figures."""

import itertools
import json
import pathlib
import shlex

import pytest

from paceline.cli import main
from paceline.course.answers.scaling import answer_scaling
from paceline.course.deliverables import DELIVERABLES, Part
from paceline.course.report import build_report, commands_for
from paceline.course.suite.presets import suite_cases
from paceline.reports.evidence.groups import Evidence
from paceline.scaling import synthetic_sweep
from tests.unit.course.report_cases import committed_records, sentences, swapped
from tests.unit.scaling.surfaces import SURFACE

# The courses' problems, in order.
CONTRACT = """
benchmarking_script, nsys_profile, mixed_precision_accumulation, benchmarking_mixed_precision,
memory_profiling, pytorch_attention, torch_compile, flash_forward, flash_backward,
flash_benchmarking, distributed_communication_single_node, naive_ddp, minimal_ddp_flat,
ddp_overlap_individual_parameters, ddp_overlap_bucketed, ddp_bucketed_benchmarking (equations),
communication_accounting, optimizer_state_sharding, chinchilla_isoflops
"""
PARTS = [(deliverable, part) for deliverable in DELIVERABLES for part in deliverable.parts]
pytestmark = pytest.mark.usefixtures("no_pictures")


def test_every_problem_has_a_section_in_order_and_every_part_an_answer_of_its_own() -> None:
    names = [name for deliverable in DELIVERABLES for name in deliverable.name.split(", ")]
    assert names == [name.strip() for name in CONTRACT.split(",")]
    assert len({part.answer for _, part in PARTS}) == len(PARTS)


def test_an_empty_store_leaves_the_right_calculations_and_commands_for_the_rest() -> None:
    report = build_report([])
    for section, deliverable in zip(report.sections, DELIVERABLES, strict=True):
        for part, asked in zip(section.parts, deliverable.parts, strict=True):
            assert bool(part.blocks) == (asked.kind is None) == (not part.commands), part.title
            assert len(part.commands) != 1, "only the command for GPUs"
            assert part.question.endswith("?")
            profiled = asked.kind in ("memory_timeline", "timeline")
            for command in part.commands[:-1]:
                assert ("profile " in command) == profiled, part.title
    parts = [part for section in report.sections for part in section.parts]
    calculated = [part for part in parts if part.blocks]
    assert f"{len(calculated)} of {len(PARTS)} questions" in report.summary[0]
    text = " ".join(sentence for part in parts for sentence in sentences(part.blocks))
    figures = """9.9531; 10.0021; 3,276 GiB; 41 H100; 17,547,264; 35 devices; 54; 25,302; 20,444;
        15,699; 3,925; s/(n w) + n o; 128.00 MiB; 29.78 GiB to 22.33 GiB; 5.00 MiB at context 128;
        float32, not float16"""
    assert [each.strip() for each in figures.split(";") if each.strip() not in text] == []


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, id=f"{each.name}: {part.title}") for each, part in PARTS if part.kind],
)
def test_findings_change_with_the_figures_and_say_where_they_are_from(part: Part) -> None:
    records = committed_records()
    blocks = part.answer(Evidence.of(records))
    assert sentences(blocks)
    for order in (lambda each: each[::-1], lambda each: each[3:] + each[:3]):
        assert sentences(blocks) != sentences(part.answer(Evidence.of(swapped(records, order))))
    for found in blocks:
        assert found.tables
        assert found.environments
        assert all("torch 2" in place and "processors" in place for place in found.environments)


def test_every_command_of_the_report_and_of_the_suite_is_one() -> None:
    presets = itertools.product(("laptop", "2gpu", "8gpu"), (False, True))
    cases = [case for preset, quick in presets for case in suite_cases(preset, quick=quick)]
    commands = {command for asked in PARTS for command in commands_for(*asked)}
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
    (given,) = answer_scaling(Evidence.of([], runs))
    assert "runs.json" in given.heading
    figures = [each.figures for each in given.findings]
    sizes = [each["parameters"] for each in figures[:2]]
    assert sizes == pytest.approx([3.351e10, 1.0942e11], rel=2e-3)
    assert figures[0]["tokens_per_parameter"] == pytest.approx(1e23 / 6 / sizes[0] ** 2, rel=1e-3)
    (wasted,) = [each["wasted_share"] for each in figures if "wasted_share" in each]
    assert wasted > 0.1
    (made_up,) = answer_scaling(Evidence.of([]))
    assert "Synthetic" in made_up.heading
    assert made_up.findings[:2] != given.findings[:2]
