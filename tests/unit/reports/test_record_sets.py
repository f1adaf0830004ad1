"""Tests of which records a comparison takes."""

import pytest

from paceline.records.kinds import (
    LINK_RATE,
    MEASURED_LINK_RATE,
    MEASURED_SITE_RATE,
    NUM_SITES,
    SITE_RATE,
)
from paceline.reports.record_sets import comparable_groups, describe_topology, varies
from tests.unit.record_factory import communication_record


@pytest.mark.parametrize(
    ("nominal", "measured"), [(LINK_RATE, MEASURED_LINK_RATE), (SITE_RATE, MEASURED_SITE_RATE)]
)
def test_runs_over_one_link_are_compared_whatever_it_carried(nominal: str, measured: str) -> None:
    """The rate that was measured of a link differs on every run."""
    records = [
        communication_record(size, 2, **{nominal: 1e9, measured: rate})
        for size, rate in ((2**20, 0.98e9), (2**21, 0.99e9), (2**22, 1.0e9))
    ]
    by_size = varies("size_bytes")
    assert comparable_groups(records, ["size_bytes"], holds=by_size) == [records]
    assert comparable_groups(records[:1], ["size_bytes"], holds=by_size) == []


@pytest.mark.parametrize("field", [LINK_RATE, NUM_SITES, SITE_RATE, "hardware"])
def test_records_of_two_places_are_two_groups(field: str) -> None:
    here, there = (communication_record(2**20, 2, **{field: value}) for value in (1, 2))
    assert comparable_groups([here, there], ["size_bytes"]) == [[here], [there]]


def test_a_place_in_sites_is_described() -> None:
    links = {LINK_RATE: 1e10, NUM_SITES: 2, SITE_RATE: 1e8}
    record = communication_record(2**20, 4, num_hosts=4, **links)
    described = "4 hosts, 2 sites, links of 10 Gbit/s, uplinks of 100 Mbit/s"
    assert describe_topology(record).endswith(described)


def test_records_that_differ_otherwise_are_not_compared() -> None:
    """The larger group of a place is taken."""
    few = communication_record(2**20, 2)
    many = [communication_record(size, 4) for size in (2**20, 2**21)]
    assert comparable_groups([few, *many], ["size_bytes"]) == [many]
