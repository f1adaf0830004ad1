"""Tests of which records a comparison takes."""

import pytest

from paceline.records.kinds import LINK_RATE, MEASURED_LINK_RATE
from paceline.reports.record_sets import comparable_groups, varies
from tests.unit.record_factory import communication_record


def test_runs_over_one_link_are_compared_whatever_it_carried() -> None:
    """The rate that was measured of a link differs on every run."""
    records = [
        communication_record(size, 2, **{LINK_RATE: 1e9, MEASURED_LINK_RATE: rate})
        for size, rate in ((2**20, 0.98e9), (2**21, 0.99e9), (2**22, 1.0e9))
    ]
    by_size = varies("size_bytes")
    assert comparable_groups(records, ["size_bytes"], holds=by_size) == [records]
    assert comparable_groups(records[:1], ["size_bytes"], holds=by_size) == []


@pytest.mark.parametrize("field", [LINK_RATE, "hardware"])
def test_records_of_two_places_are_two_groups(field: str) -> None:
    here, there = (communication_record(2**20, 2, **{field: value}) for value in (1, 2))
    assert comparable_groups([here, there], ["size_bytes"]) == [[here], [there]]


def test_records_that_differ_otherwise_are_not_compared() -> None:
    """The larger group of a place is taken."""
    few = communication_record(2**20, 2)
    many = [communication_record(size, 4) for size in (2**20, 2**21)]
    assert comparable_groups([few, *many], ["size_bytes"]) == [many]
