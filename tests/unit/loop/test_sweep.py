"""Tests of sweeps from spec to rows, with runs whose losses lie on a known surface."""

import json
import pathlib
import random

import msgspec
import pytest

from paceline.core.errors import UsageError
from paceline.loop.sweep import SweepFailedError, sweep_table
from paceline.loop.sweep_design import COST_OF_LARGEST
from paceline.loop.sweep_directory import ENDED, ROWS, SweepDirectory
from paceline.scaling import fit, read_sweep
from paceline.scaling.surface import tokens_for
from tests.unit.loop.fake_runs import BASE, SPEC, SURFACE, FakeExecutor, make_sweep_runner


def test_a_sweep_finds_the_best_model(tmp_path: pathlib.Path) -> None:
    executor = FakeExecutor()
    runner = make_sweep_runner(tmp_path, executor)
    small, large, _batch = runner.run(SPEC, BASE)
    assert len(executor.made) == len(set(executor.made)) >= 16 + 11
    # The initial learning rate is twice the best one, and later runs correct for it.
    for rate in (small, large):
        assert rate.figures["factor"] == pytest.approx(0.5, rel=0.3)
    rule = runner.rule()
    assert rule.learning_rate_factor == pytest.approx(0.5, rel=0.3)
    found = fit(read_sweep(tmp_path / ROWS), num_draws=50)
    sizes, _ = found.parametric.optimum([SPEC.target])
    assert float(sizes[0]) == pytest.approx(float(SURFACE.optimal_parameters(SPEC.target)), rel=0.1)
    tokens = float(tokens_for(SPEC.target, float(sizes[0])))
    assert float(found.parametric.surface.loss(float(sizes[0]), tokens)) == pytest.approx(
        float(SURFACE.loss(float(sizes[0]), tokens)), rel=0.005
    )
    planned = runner.directory.state().runs
    spent = sum(run.flops for run in planned if run.purpose == "fit")
    assert spent <= 1.05 * COST_OF_LARGEST * SPEC.largest
    table = sweep_table(runner.directory)
    assert len(table.rows) == len(planned)
    assert f"{len(planned)} of {len(planned)} planned runs have ended" in table.caption


def test_what_was_expected_of_refining_runs_comes_true(tmp_path: pathlib.Path) -> None:
    make_sweep_runner(tmp_path, FakeExecutor()).run(SPEC, BASE)
    rows = SweepDirectory(tmp_path).rows("fit")
    expected = [row for row in rows if row.expected_loss is not None]
    assert len(expected) >= 3
    assert {row.name for row in rows} - {row.name for row in expected}
    for row in expected:
        assert row.final_loss is not None
        assert row.expected_loss == pytest.approx(row.final_loss, rel=0.05)


@pytest.mark.parametrize("seed", range(2))
def test_a_sweep_that_dies_comes_to_the_same_rows(tmp_path: pathlib.Path, seed: int) -> None:
    make_sweep_runner(tmp_path / "whole", FakeExecutor()).run(SPEC, BASE)
    chance = random.Random(seed)
    made: list[str] = []
    for _ in range(100):
        executor = FakeExecutor(dies_after=chance.randrange(1, 15))
        try:
            make_sweep_runner(tmp_path / "killed", executor).run(SPEC, BASE)
        except KeyboardInterrupt:
            made += executor.made
            continue
        made += executor.made
        break
    assert len(made) == len(set(made))
    whole, killed = (
        [json.loads(line) for line in (tmp_path / name / ROWS).read_text().splitlines()]
        for name in ("whole", "killed")
    )
    assert killed == whole


def test_a_run_that_fails_is_an_outcome(tmp_path: pathlib.Path) -> None:
    runner = make_sweep_runner(tmp_path, FakeExecutor(failing=["rate-03", "rate-06", "fit-02"]))
    small, _batch = runner.run(SPEC, BASE)
    # Without the larger model's run at the rule's own rate, the small model decides.
    assert runner.rule().learning_rate_factor == pytest.approx(small.figures["factor"])
    rows = {row.name: row for row in runner.directory.rows("fit")}
    assert rows["fit-02"].outcome == "diverged"
    assert rows["fit-02"].final_loss is None
    sweep = read_sweep(tmp_path / ROWS)
    assert len(sweep) == len(rows) - 1
    assert "fit-02: diverged: not finite" in sweep_table(runner.directory).notes


def test_a_run_that_is_always_killed_fails_after_three_attempts(tmp_path: pathlib.Path) -> None:
    executor = FakeExecutor(killed=["fit-01"])
    runner = make_sweep_runner(tmp_path, executor)
    runner.run(SPEC, BASE)
    assert executor.made.count("fit-01") == 3
    row = next(row for row in runner.directory.rows("fit") if row.name == "fit-01")
    assert (row.outcome, row.reason) == ("failed", "killed 3 times")


@pytest.mark.parametrize("failing", [["rate-01", "rate-06"], ["batch-01"]])
def test_without_the_rules_own_run_nothing_can_be_compared(
    tmp_path: pathlib.Path, failing: list[str]
) -> None:
    runner = make_sweep_runner(tmp_path, FakeExecutor(failing=failing))
    with pytest.raises(SweepFailedError, match=f"{failing[0]}: not finite"):
        runner.run(SPEC, BASE)


def test_another_question_needs_another_directory(tmp_path: pathlib.Path) -> None:
    SweepDirectory(tmp_path).begin(SPEC, BASE)
    other = msgspec.structs.replace(SPEC, target=2e14)
    with pytest.raises(UsageError, match=r"target 1e\+14 there, 2e\+14 here"):
        SweepDirectory(tmp_path).begin(other, BASE)


def test_a_damaged_state_or_ending_is_named(tmp_path: pathlib.Path) -> None:
    directory = SweepDirectory(tmp_path)
    directory.begin(SPEC, BASE)
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(UsageError, match=r"sweep\.json: not the state of a sweep"):
        directory.state()
    runner = make_sweep_runner(tmp_path / "other", FakeExecutor())
    runner.run(SPEC, BASE)
    run = runner.directory.state().runs[0]
    (runner.directory.run_directory(run) / ENDED).write_text("[]")
    with pytest.raises(UsageError, match=r"ended\.json: not the ending of a run"):
        runner.directory.result(run)
