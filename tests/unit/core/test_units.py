import pytest

from paceline.core import UsageError
from paceline.core.units import (
    GB,
    GIB,
    MB,
    MIB,
    format_binary_bytes,
    format_decimal,
    format_digits,
    format_duration,
    format_gibibytes,
    format_gigabytes,
    format_seconds,
    format_suffixed,
    parse_bytes,
    parse_rate,
    parse_seconds,
    printable,
    to_gibibytes,
    to_gigabytes,
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


def test_eighty_of_either_are_not_the_same() -> None:
    assert format_gigabytes(to_gigabytes(80 * GB)) == "80 GB"
    assert format_gibibytes(to_gibibytes(80 * GB), 1) == "74.5 GiB"
    assert format_gigabytes(to_gigabytes(80 * GIB), 1) == "85.9 GB"


def test_a_type_checker_keeps_them_apart() -> None:
    # mypy checks the tests and reports ignore comments that suppress no error.
    format_gigabytes(to_gibibytes(GIB))  # type: ignore[arg-type]
    format_gibibytes(to_gigabytes(GB))  # type: ignore[arg-type]
    format_gibibytes(80.0)  # type: ignore[arg-type]


def test_decimal_prefixes() -> None:
    assert format_decimal(75.2e9, "FLOP/s") == "75.2 GFLOP/s"
    assert format_decimal(3, "B") == "3 B"
    assert format_decimal(999.9e12, "FLOP/s") == "1 PFLOP/s"


def test_large_numbers_are_shown_without_exponents() -> None:
    assert [format_digits(value) for value in (0.0123, 12.34, 999.9, 1234.5, 1e15)] == [
        *("0.0123", "12.3", "1,000", "1,234", "1e+15")
    ]
    assert [format_suffixed(value) for value in (7, 4.194e6, 4.34e10, 999.9e9, 1.5e13, 2e15)] == [
        *("7", "4.19M", "43.4B", "1T", "15T", "2,000T")
    ]
    assert format_seconds(123_456) == "123,000 s"
    assert format_decimal(2.5e19, "FLOP") == "25,000 PFLOP"


def test_durations_have_two_units() -> None:
    shown = {0.4: "0 s", 59.7: "1 min", 61: "1 min 1 s", 3599.9: "1 h", 3725: "1 h 2 min"}
    shown |= {86_399.9: "1 d", 90_000: "1 d 1 h"}
    assert {seconds: format_duration(seconds) for seconds in shown} == shown


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


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        *(("2gbit", 2e9), ("200 Mbit", 2e8), ("1.5Gbit/s", 1.5e9), ("1tbit", 1e12)),
        *(("1GB/s", 8e9), ("125 MB/s", 1e9), ("1MiB/s", 8 * MIB)),
    ],
)
def test_rates_are_read_in_bits_and_bytes(text: str, bits_per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(bits_per_s)


# 1Gb/s is ambiguous: network engineers mean gigabits. 2GB is a size, not a rate.
@pytest.mark.parametrize("text", ["2", "2GB", "-1gbit", "1Gb/s", "fast", ""])
def test_a_rate_without_its_unit_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(UsageError, match=r"write it like 2gbit, 2Gbit/s or 250MB/s"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["0gbit", "0.0MB/s"])
def test_a_rate_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="carries nothing; it must be positive"):
        parse_rate(text)


def test_durations_are_read_with_their_unit() -> None:
    read = [parse_seconds(text) for text in ("5ms", "20us", "20 µs", "2s", "3ns")]
    assert read == pytest.approx([0.005, 2e-5, 2e-5, 2.0, 3e-9])
    with pytest.raises(UsageError, match="cannot read the delay '5'; write it like 5ms"):
        parse_seconds("5", "delay")


def test_seconds() -> None:
    assert [format_seconds(value) for value in (2.0, 0.9996, 0.0125, 3e-6, 0.0)] == [
        "2 s",
        "1 s",
        "12.5 ms",
        "3 µs",
        "0 s",
    ]


def test_control_characters_are_printed_not_obeyed() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\rd") == r"a\x1b[2Jb\x07\x9bc\x0dd"
    assert printable("two\nlines\tand Äöü €") == "two\nlines\tand Äöü €"
