"""Tests of corrections from earlier runs (factors, offsets, intervals) and of their store."""

import dataclasses
import multiprocessing
import pathlib
import random

import msgspec
import pytest

from paceline.core.errors import RecordError
from paceline.core.plan import Estimate
from paceline.predict.history import (
    HistoryEntry,
    Quantity,
    accuracy_by_quantity,
    append_history,
    corrected,
    history_path,
    read_history,
)

LOOPS = pathlib.Path(__file__).parents[3] / "results" / "loop"


def _entry(
    quantity: Quantity = "step_time_s",
    formula: float | None = 1.0,
    measured: float = 1.0,
    parameters: int = 1000,
    predicted: Estimate | None = None,
    run: str = "run",
) -> HistoryEntry:
    return HistoryEntry(
        quantity=quantity,
        run=run,
        parameters=parameters,
        world_size=1,
        threads=1,
        hardware="a machine",
        formula=formula,
        predicted=predicted,
        measured=measured,
    )


def test_times_are_corrected_by_their_ratio() -> None:
    history = [_entry(formula=seconds, measured=1.2 * seconds) for seconds in (1, 2, 3, 5, 8, 13)]
    found = corrected("step_time_s", 10.0, "a machine", 1, history)
    assert found.value == pytest.approx(12.0)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 12 < found.high < 12.5


def test_memory_is_corrected_by_what_a_process_holds_besides() -> None:
    history = [
        _entry("memory_bytes", formula=size, measured=size + 500.0)
        for size in (10, 20, 40, 80, 160)
    ]
    assert corrected("memory_bytes", 1000.0, "a machine", 1, history).value == 1500.0


def test_runs_with_a_like_prediction_count_most() -> None:
    short = [_entry(formula=0.01, measured=0.02) for _ in range(5)]
    long = [_entry(formula=1.0, measured=1.1) for _ in range(5)]
    near_long = corrected("step_time_s", 2.0, "a machine", 1, [*short, *long])
    near_short = corrected("step_time_s", 0.005, "a machine", 1, [*short, *long])
    assert (near_long.value, near_short.value) == (pytest.approx(2.2), pytest.approx(0.01))


def test_runs_on_several_ranks_soon_outweigh_those_on_one() -> None:
    alone = [_entry(measured=0.9, run=f"alone-{number}") for number in range(39)]
    together = [
        dataclasses.replace(_entry(measured=1.3, run=f"together-{number}"), world_size=2)
        for number in range(5)
    ]
    history = [*alone, *together]
    assert corrected("step_time_s", 1.0, "a machine", 2, history).value == pytest.approx(1.3)
    assert corrected("step_time_s", 1.0, "a machine", 1, history).value == pytest.approx(0.9)
    # Without runs on several ranks, runs on one rank are used.
    assert corrected("step_time_s", 1.0, "a machine", 2, alone).value == pytest.approx(0.9)


def test_other_machines_quantities_and_few_runs_teach_nothing() -> None:
    plain = Estimate(value=1.0)
    first = Estimate(value=1.0, low=0.9, high=2.2)
    history = [_entry(measured=2.0) for _ in range(5)]
    assert corrected("step_time_s", 1.0, "another", 1, history) == first
    assert corrected("memory_bytes", 1.0, "a machine", 1, history) == plain
    assert corrected("step_time_s", 1.0, "a machine", 1, history[:4]) == first
    assert corrected("step_time_s", 1.0, "a machine", 1, history).value == pytest.approx(2.0)


def test_the_first_interval_holds_nine_in_ten_of_the_committed_runs() -> None:
    inside = []
    for path in LOOPS.glob("seed-*/sweep.json"):
        for each in msgspec.json.decode(path.read_bytes(), type=list[HistoryEntry]):
            if each.quantity == "step_time_s" and each.formula is not None:
                first = corrected("step_time_s", each.formula, "a machine", 1, [])
                assert first.low is not None
                assert first.high is not None
                inside.append(first.low <= each.measured <= first.high)
    assert len(inside) > 90
    assert 0.88 <= sum(inside) / len(inside) <= 0.93


def test_intervals_hold_nine_in_ten() -> None:
    chance = random.Random(0)
    inside = 0
    for _ in range(300):
        runs = [_entry(measured=chance.lognormvariate(0.3, 0.1)) for _ in range(40)]
        found = corrected("step_time_s", 1.0, "a machine", 1, runs)
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= chance.lognormvariate(0.3, 0.1) <= found.high
    assert 0.84 <= inside / 300 <= 0.96


def test_a_store_keeps_each_entry_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "data" / "history.jsonl"
    assert read_history(path) == []
    entries = [
        _entry(predicted=Estimate(value=1.1, low=1.0, high=1.2)),
        _entry("heldout_loss", formula=None, measured=3.0),
    ]
    append_history(path, entries)
    append_history(path, [*entries, dataclasses.replace(entries[0], run="another")])
    assert read_history(path) == [*entries, dataclasses.replace(entries[0], run="another")]


def test_coverage_counts_what_was_inside() -> None:
    history = [
        _entry(predicted=Estimate(value=1.1, low=0.9, high=1.2)),
        _entry(predicted=Estimate(value=1.3, low=1.2, high=1.4)),
        _entry(predicted=Estimate(value=0.8)),
        _entry(),
        _entry("memory_bytes"),
    ]
    (found,) = accuracy_by_quantity(history).values()
    assert (found.num_predicted, found.num_intervals, found.num_inside) == (3, 2, 1)
    assert found.median_error == pytest.approx(0.2)
    assert found.largest_error == pytest.approx(0.3)


def test_the_store_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("PACELINE_HISTORY", str(tmp_path / "mine.jsonl"))
    assert history_path() == tmp_path / "mine.jsonl"
    monkeypatch.delenv("PACELINE_HISTORY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert history_path() == tmp_path / "paceline" / "history.jsonl"


def test_a_user_without_a_home_is_told_where_a_history_can_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """As in `docker run --user 12345`."""
    for name in ("PACELINE_HISTORY", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", no_home)
    with pytest.raises(RecordError, match="no home directory; set PACELINE_HISTORY"):
        history_path()


def test_two_commands_add_the_same_entry_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "history.jsonl"
    context = multiprocessing.get_context("spawn")
    entries = [_entry(formula=1.0, measured=float(number)) for number in range(5)]
    writers = [context.Process(target=append_history, args=(path, entries)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert read_history(path) == entries
