import pytest

from paceline.core import UsageError
from paceline.core.units import (
    GB,
    GIB,
    MB,
    MIB,
    format_binary_bytes,
    format_decimal,
    format_seconds,
    parse_bytes,
)


def test_decimal_and_binary_units_differ() -> None:
    assert GB == 1_000_000_000
    assert GIB == 1_073_741_824


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1.5 * GIB, "1.50 GiB"), (MIB, "1.00 MiB")],
)
def test_binary_bytes(num_bytes: float, text: str) -> None:
    assert format_binary_bytes(num_bytes) == text


def test_decimal_prefixes() -> None:
    assert format_decimal(75.2e9, "FLOP/s") == "75.2 GFLOP/s"
    assert format_decimal(3, "B") == "3 B"
    assert format_decimal(999.9e12, "FLOP/s") == "1 PFLOP/s"


def test_sizes_are_read_in_both_systems() -> None:
    assert [parse_bytes(text) for text in ("1MB", "1.5 MiB", "10kb", "7B", "1GiB")] == [
        MB,
        1_572_864,
        10_000,
        7,
        GIB,
    ]
    for bad in ("10", "MB", "1TBB", "-1MB", ""):
        with pytest.raises(UsageError, match="write it like 10MB"):
            parse_bytes(bad)


def test_seconds() -> None:
    assert [format_seconds(value) for value in (2.0, 0.9996, 0.0125, 3e-6, 0.0)] == [
        "2 s",
        "1 s",
        "12.5 ms",
        "3 µs",
        "0 s",
    ]
