"""Tests of the replay of Llama 3's interruptions: effective training time and assumptions."""

import pytest

from paceline.planner.goodput.options import CONSTANTS, LLAMA3, LLAMA3_EFFECTIVE, options
from paceline.planner.goodput.simulate import option_records, replay_records, simulate
from paceline.records import Record, capture_environment
from paceline.reports.plots.registry import draw
from paceline.reports.tables.reliability import gains_table, goodput_table, replay_table


def test_the_published_effective_time_is_reached_within_two_points() -> None:
    found = simulate(LLAMA3, trials=24)
    assert found.failures_per_day * 54 == pytest.approx(419, rel=0.05)
    assert found.goodput == pytest.approx(LLAMA3_EFFECTIVE, abs=0.02)
    assert found.goodput == pytest.approx(LLAMA3.formula(), abs=2 * found.error)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    chosen = options((1_024, 16_384), CONSTANTS["cluster"], days=5)
    return list(
        option_records(chosen, capture_environment(), constants="cluster", trials=2, seed=1)
    )


def test_the_tables_show_every_choice(records: list[Record]) -> None:
    assert len(goodput_table(records).rows) == 24
    # Five simulated days are noisy, but at 16,384 devices replicas pay off in any case.
    *_, last = gains_table(records).rows
    assert float(last[5]) > 2
    assert draw("goodput", records).axes


def test_the_table_of_the_replay_begins_with_what_is_assumed() -> None:
    replayed = list(replay_records(capture_environment(), trials=1, seed=0))
    table = replay_table(replayed, LLAMA3_EFFECTIVE)
    assert table.rows[0][0] == "as assumed"
    assert len(table.rows) == len(replayed) > 10
