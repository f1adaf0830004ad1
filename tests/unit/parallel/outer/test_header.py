"""Tests of what sites say of an exchange."""

import dataclasses

import pytest

from paceline.parallel.outer.header import Header

HEADER = Header(
    settings=2**55 + 1,
    has_changed=False,
    num_members=3,
    exchange=7,
    fragment=1,
    step=40,
    compression=12345,
    num_elements=10**12,
    is_finite=True,
)


def test_a_header_arrives_as_it_was_sent() -> None:
    assert Header.of(HEADER.numbers()) == HEADER


@pytest.mark.parametrize("field", range(len(dataclasses.fields(Header)) + 1))
def test_a_damaged_header_is_known(field: int) -> None:
    numbers = HEADER.numbers()
    numbers[field] ^= 1
    assert Header.of(numbers) is None
