import pytest

from paceline.core.units import GB, GIB, MIB, format_binary_bytes, format_decimal, format_seconds


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


def test_seconds() -> None:
    assert [format_seconds(value) for value in (2.0, 0.0125, 3e-6, 0.0)] == [
        "2 s",
        "12.5 ms",
        "3 µs",
        "0 s",
    ]
