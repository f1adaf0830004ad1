"""Tests of the links in a record's case, from the lab's variables to their description."""

import pytest

from paceline.core import UsageError
from paceline.records.kinds import (
    LINK_LOSS,
    LINK_RATE,
    MEASURED_LINK_RATE,
    MEASURED_SITE_RATE,
    NUM_SITES,
    SITE_DELAY,
    SITE_RATE,
)
from paceline.records.links import describe_link, find_link, link_case_fields, link_variables

HOSTS = {"device": "cpu", "num_hosts": 4}


def test_what_the_lab_says_is_in_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {LINK_RATE: 1e10, NUM_SITES: 2, SITE_RATE: 1e8, SITE_DELAY: 0.02}
    for name, value in link_variables({**fields, LINK_LOSS: None}).items():
        monkeypatch.setenv(name, value)
    assert link_case_fields() == fields
    assert isinstance(link_case_fields()[NUM_SITES], int)


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NUM_SITES", "two")
    with pytest.raises(UsageError, match="PACELINE_NUM_SITES is 'two'; unset it"):
        link_case_fields()


@pytest.mark.parametrize(
    ("rates", "bytes_per_s", "name"),
    [
        ({LINK_RATE: 1e9}, 1.25e8, "links shaped to 1 Gbit/s"),
        ({LINK_RATE: 1e10, SITE_RATE: 1e8}, 1.25e7, "uplinks of sites shaped to 100 Mbit/s"),
        ({LINK_RATE: 1e8, SITE_RATE: 1e9}, 1.25e7, "links shaped to 100 Mbit/s"),
        ({SITE_RATE: 1e8}, 1.25e7, "uplinks of sites shaped to 100 Mbit/s"),
    ],
)
def test_the_slowest_link_limits_a_ring(
    rates: dict[str, float], bytes_per_s: float, name: str
) -> None:
    link = find_link({**HOSTS, **rates})
    assert link == (bytes_per_s, name)
    assert describe_link({**HOSTS, **rates}) == name


def test_links_of_no_known_rate_have_a_measured_one() -> None:
    assert find_link(HOSTS) is None
    measured = {**HOSTS, MEASURED_LINK_RATE: 8e9}
    assert describe_link(measured) == "a single stream reached 8 Gbit/s just before"
    between_sites = {**measured, NUM_SITES: 2, MEASURED_SITE_RATE: 5e9}
    assert describe_link(between_sites) == "a single stream reached 5 Gbit/s just before"
