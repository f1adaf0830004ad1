"""Tests of the docs' table of repeated calibrations."""

import msgspec
import pytest

from paceline.core import UsageError
from paceline.records import Metric, Record
from studies.planner.calibration_repeats import repeats_table
from tests.unit.predict.calibration_cases import make_records


def _scaled(records: list[Record], factor: float) -> list[Record]:
    return [
        msgspec.structs.replace(
            record,
            metrics={
                name: Metric(value=metric.value * factor) for name, metric in record.metrics.items()
            },
        )
        for record in records
    ]


def test_ranges_are_over_the_median_of_the_repetitions() -> None:
    records = make_records()
    table = repeats_table([*records, *_scaled(records, 1.1), *_scaled(records, 0.98)])
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["optimizer"] == ("1", "12.0%", "12.0%")
    assert rows["calls"] == ("2", "12.0%", "12.0%")
    assert table.caption.startswith("3 calibrations in a row")


def test_the_same_again_does_not_differ() -> None:
    table = repeats_table([*make_records(), *make_records()])
    assert {row[-1] for row in table.rows} == {"0.0%"}


def test_places_are_not_mixed() -> None:
    with pytest.raises(UsageError, match="of one place"):
        repeats_table([*make_records(), *make_records(link_rate_bits_per_s=1e9)])
