"""Tests of loops from budget to outcome, with runs whose losses lie on a known surface."""

import dataclasses
import pathlib
import random
from collections.abc import Sequence

import msgspec
import pytest

from paceline.core.errors import UsageError
from paceline.loop.directory import LoopDirectory, LoopStoppedError, Outcome
from paceline.loop.run import LoopRunner
from paceline.predict.history import read_history
from tests.unit.loop.fake_machine import SPEC, FakeCalibration, make_runner
from tests.unit.loop.fake_runs import BASE, SURFACE, FakeExecutor


@dataclasses.dataclass(frozen=True)
class _Whole:
    """A loop that nothing interrupted."""

    place: pathlib.Path
    executor: FakeExecutor
    runner: LoopRunner
    outcome: Outcome
    said: dict[str, list[str]]
    """The lines of each stage."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> _Whole:
    place = tmp_path_factory.mktemp("whole")
    executor = FakeExecutor()
    said: dict[str, list[str]] = {}

    def tell(stage: str, lines: Sequence[str]) -> None:
        said.setdefault(stage, []).extend(lines)

    runner = make_runner(place, executor, tell=tell)
    return _Whole(place, executor, runner, runner.run(SPEC, BASE), said)


def test_a_budget_becomes_a_model_whose_loss_was_predicted(whole: _Whole) -> None:
    assert list(whole.said) == ["calibrate", "fit", "choose", "plan", "train"]
    model = whole.runner.directory.model()
    assert model is not None
    assert model.run.flops == pytest.approx(SPEC.budget, rel=0.01)
    assert model.extrapolation >= 8
    best = float(SURFACE.optimal_parameters(SPEC.budget))
    assert model.run.fitted_parameters == pytest.approx(best, rel=0.3)
    (loss,) = [each for each in whole.outcome.entries if each.quantity == "heldout_loss"]
    assert loss.error == pytest.approx(0, abs=0.01)
    assert loss.is_inside
    assert whole.outcome.sweep_flops == pytest.approx(SPEC.budget, rel=0.15)
    assert whole.executor.made[-1] == "final"


def test_lines_say_what_each_stage_decided(whole: _Whole) -> None:
    assert "predicted time " in whole.said["calibrate"][0]
    assert "held-out loss" in whole.said["choose"][1]
    assert "ranks" in whole.said["plan"][0]


def test_every_prediction_is_remembered_and_corrects_the_next(whole: _Whole) -> None:
    outcome = whole.outcome
    history = read_history(whole.place / "history.jsonl")
    assert {each.quantity for each in history} == {
        *("step_time_s", "memory_bytes", "duration_s", "heldout_loss")
    }
    assert history[-len(outcome.entries) :] == list(outcome.entries)
    # All fake runs report 400 MB, regardless of the formulas for their tensors.
    (memory,) = [each for each in outcome.entries if each.quantity == "memory_bytes"]
    assert memory.predicted is not None
    assert memory.predicted.low is not None
    assert memory.formula != memory.predicted.value
    whole.runner.run(SPEC, BASE)
    assert read_history(whole.place / "history.jsonl") == history


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(10))
def test_a_loop_that_dies_comes_to_the_same_outcome(
    whole: _Whole, tmp_path: pathlib.Path, seed: int
) -> None:
    chance = random.Random(seed)
    made: list[str] = []
    calibrate = FakeCalibration()
    for _ in range(100):
        executor = FakeExecutor(dies_after=chance.randrange(1, 12))
        runner = make_runner(tmp_path, executor, calibrate=calibrate)
        try:
            outcome = runner.run(SPEC, BASE)
        except KeyboardInterrupt:
            made += executor.made
            continue
        made += executor.made
        break
    assert len(made) == len(set(made)) > 16
    assert calibrate.calls == [1, 2, 1, 2]
    assert outcome == whole.outcome


def test_a_deadline_that_cannot_be_met_is_refused_with_what_can(tmp_path: pathlib.Path) -> None:
    executor = FakeExecutor()
    runner = make_runner(tmp_path, executor, deadline_s=1.0)
    with pytest.raises(UsageError, match=r"the deadline is 1 s; --budget \S+ would fit"):
        runner.run(SPEC, BASE)
    assert not executor.made


def test_text_that_is_too_short_is_said_before_the_final_run(tmp_path: pathlib.Path) -> None:
    short = msgspec.structs.replace(SPEC, most_tokens=7e6)
    executor = FakeExecutor()
    with pytest.raises(LoopStoppedError, match="the text allows 7,000,000; prepare more text"):
        make_runner(tmp_path, executor).run(short, BASE)
    assert "final" not in executor.made


def test_a_final_run_that_fails_says_where_to_look(tmp_path: pathlib.Path) -> None:
    executor = FakeExecutor(failing=["final"])
    with pytest.raises(LoopStoppedError, match=r"the final run failed: not finite; see .*log"):
        make_runner(tmp_path, executor).run(SPEC, BASE)


def test_another_budget_needs_another_directory(tmp_path: pathlib.Path) -> None:
    directory = LoopDirectory(tmp_path)
    directory.begin(SPEC)
    directory.begin(SPEC)
    with pytest.raises(UsageError, match="name another directory with --out"):
        directory.begin(msgspec.structs.replace(SPEC, budget=2e14))
    (tmp_path / "loop.json").write_text("{")
    with pytest.raises(UsageError, match=r"loop\.json: not a file that a loop has written"):
        directory.spec()


def test_a_layout_whose_pilot_run_fails_is_not_taken(tmp_path: pathlib.Path) -> None:
    runner = make_runner(tmp_path, FakeExecutor(failing=["pilot-1"]))
    runner.run(SPEC, BASE)
    layout = runner.directory.layout()
    assert layout is not None
    assert layout.chosen.ranks == 2
    assert layout.chosen.pilot is not None
    assert [each.pilot for each in layout.candidates[1:]] == [None] * (len(layout.candidates) - 1)
    assert 1 in {each.ranks for each in layout.candidates[1:]}
    # The pilot's measurement is the prediction, and no interval is narrower than the run-to-run
    # spread.
    assert layout.step_time_s.value == layout.chosen.pilot.step_time_s
    assert layout.step_time_s.low is not None
    assert layout.step_time_s.low < 0.96 * layout.step_time_s.value


def test_the_duration_of_a_resumed_run_is_not_known(tmp_path: pathlib.Path) -> None:
    runner = make_runner(tmp_path, FakeExecutor(resumed=["fit-01", "final"]))
    outcome = runner.run(SPEC, BASE)
    assert "duration_s" not in {each.quantity for each in outcome.entries}
    history = read_history(tmp_path / "history.jsonl")
    timed = {each.run.partition("/")[2] for each in history if each.quantity == "duration_s"}
    assert "fit-02" in timed
    assert not timed & {"fit-01", "final"}


def test_a_model_that_trains_on_no_number_of_ranks_ends_the_loop(tmp_path: pathlib.Path) -> None:
    runner = make_runner(tmp_path, FakeExecutor(failing=["pilot-1", "pilot-2"]))
    with pytest.raises(LoopStoppedError, match=r"the pilot runs failed .* \(1, 2\)"):
        runner.run(SPEC, BASE)
