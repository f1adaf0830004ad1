"""Tests of the replay of Llama 3's interruptions: effective training time and assumptions."""

import msgspec
import pytest

from paceline.cli.main import main
from paceline.planner.goodput.options import CONSTANTS, LLAMA3, LLAMA3_EFFECTIVE, options
from paceline.planner.goodput.simulate import option_records, replay_records, simulate
from paceline.records import Metric, Record, capture_environment
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
    rows = goodput_table(records).rows
    # Destinations that cannot be told apart share a row, and none is left out.
    saved = [destination for row in rows for destination in row[2].split(", ")]
    assert len(saved) == len(records) == 24
    assert len(rows) < 24
    # Five simulated days are noisy, but at 16,384 devices replicas pay off in any case.
    *_, last = gains_table(records).rows
    assert float(last[5]) > 2
    assert draw("goodput", records).axes


def test_destinations_are_one_row_only_if_their_intervals_overlap(records: list[Record]) -> None:
    apart = []
    for place, record in enumerate(records):
        goodput = Metric(value=0.9 - 0.01 * place, high=0.901 - 0.01 * place)
        metrics = {**record.metrics, "goodput": goodput}
        apart.append(msgspec.structs.replace(record, metrics=metrics))
    assert len(goodput_table(apart).rows) == len(records)


def test_the_table_of_the_replay_begins_with_what_is_assumed() -> None:
    replayed = list(replay_records(capture_environment(), trials=1, seed=0))
    table = replay_table(replayed, LLAMA3_EFFECTIVE)
    assert table.rows[0][0] == "as assumed"
    assert len(table.rows) == len(replayed) > 10


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--devices", "8"], "--devices"),
        (["--constants", "measured"], "--constants"),
        (["--detection", "1s"], "--detection"),
        (["--restart", "1s"], "--restart"),
        (["--disk-bandwidth", "1GB/s"], "--disk-bandwidth"),
    ],
)
def test_a_replay_takes_no_other_cluster(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "goodput", "--replay", *flags]) == 2
    assert f"takes no {named}; leave one out" in capsys.readouterr().err
