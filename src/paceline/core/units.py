"""Byte units that do not mix: MB is 10^6 bytes, MiB is 2^20.

Storage and networks are measured in powers of ten, memory in powers of two. At a terabyte the
two differ by a tenth, enough to change how many devices a model needs. Names of functions say
which one they use. `Gigabytes` and `Gibibytes` are distinct types: a type checker rejects one in
place of the other, and a plain number of bytes in place of either.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NewType

from paceline.core.errors import UsageError

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
NANOSECOND = 1e-9
"""In seconds."""

Progress = Callable[[int, int], None]
"""Receives how much of some work is done and how much there is, in any unit."""

Gigabytes = NewType("Gigabytes", float)
"""Units of 10^9 bytes, as in the specifications of devices and links."""
Gibibytes = NewType("Gibibytes", float)
"""Units of 2^30 bytes, as allocators report."""

_BYTE_UNITS = {"b": 1, "kb": KB, "mb": MB, "gb": GB, "kib": KIB, "mib": MIB, "gib": GIB}
_BIT_UNITS = {"bit": 1, "kbit": KB, "mbit": MB, "gbit": GB, "tbit": TB}
_RATE_UNITS = {
    **_BIT_UNITS,
    **{f"{unit}/s": bits for unit, bits in _BIT_UNITS.items()},
    **{f"{unit}/s": 8 * num_bytes for unit, num_bytes in _BYTE_UNITS.items()},
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, except those that end lines and separate columns."""
_BINARY_STEPS = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_DECIMAL_STEPS = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_COUNT_STEPS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
_TIME_STEPS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_DURATION_STEPS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def parse_bytes(text: str) -> int:
    """Parses a size such as ``10MB`` or ``25MiB`` into bytes."""
    return round(parse_quantity(text, _BYTE_UNITS, "size", "10MB (10^6 bytes) or 10MiB (2^20)"))


def parse_rate(text: str) -> float:
    """Parses a rate such as ``2gbit`` (tc's notation), ``2Gbit/s`` or ``250MB/s`` into bits/s."""
    # Gb/s is ambiguous between gigabits and gigabytes, so it is rejected.
    is_ambiguous = text.strip().endswith("b/s")
    units = _BIT_UNITS if is_ambiguous else _RATE_UNITS
    rate = parse_quantity(text, units, "rate", "2gbit, 2Gbit/s or 250MB/s")
    if not rate > 0:
        raise UsageError(f"a rate of {text} carries nothing; it must be positive")
    return rate


def parse_seconds(text: str, what: str = "duration") -> float:
    """Parses a duration such as ``5ms`` or ``10min`` into seconds."""
    units = {suffix: step for step, suffix in _TIME_STEPS} | {"us": 1e-6, "min": 60.0, "h": 3600.0}
    return parse_quantity(text, units, what, "5ms, 20us, 0.1s or 5min")


def parse_quantity(text: str, units: Mapping[str, float], what: str, examples: str) -> float:
    """Parses a number followed by one of the units, whose keys are lower case."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zµ%/]+)", text.strip().lower())
    if match is None or match[2] not in units:
        raise UsageError(f"cannot read the {what} {text!r}; write it like {examples}")
    return float(match[1]) * units[match[2]]


def to_gigabytes(num_bytes: float) -> Gigabytes:
    """Converts bytes to GB (10^9 bytes)."""
    return Gigabytes(num_bytes / GB)


def to_gibibytes(num_bytes: float) -> Gibibytes:
    """Converts bytes to GiB (2^30 bytes)."""
    return Gibibytes(num_bytes / GIB)


def format_gigabytes(gigabytes: Gigabytes, digits: int = 0) -> str:
    """Formats GB with the unit, such as ``80 GB``."""
    return f"{gigabytes:,.{digits}f} GB"


def format_gibibytes(gibibytes: Gibibytes, digits: int = 0) -> str:
    """Formats GiB with the unit, such as ``74.5 GiB``."""
    return f"{gibibytes:,.{digits}f} GiB"


def format_binary_bytes(num_bytes: float) -> str:
    """Formats a number of bytes in binary units, such as ``1.50 GiB``."""
    for step, suffix in _BINARY_STEPS:
        if abs(num_bytes) >= step:
            return f"{num_bytes / step:.2f} {suffix}"
    return f"{num_bytes:.0f} B"


def format_decimal(value: float, unit: str) -> str:
    """Formats a value with a decimal prefix, such as ``75.2 GFLOP/s``."""
    return _format(value, [(step, prefix + unit) for step, prefix in _DECIMAL_STEPS], unit)


def printable(text: str) -> str:
    """Replaces control characters, which a terminal would obey, by their escape sequences."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def one_line(said: object) -> str:
    """Returns what an error says, or a name from a file, on one line: line ends are escaped."""
    return printable(str(said)).replace("\n", "\\n")


def format_count(value: float) -> str:
    """Formats a number: below 10^12 in full if whole or at least 1,000, else to four digits."""
    in_full = value == int(value) or abs(value) >= 1000
    return f"{value:,.0f}" if in_full and abs(value) < 1e12 else f"{value:.4g}"


def format_digits(value: float) -> str:
    """Formats a number to three digits, and in full from 1,000 on."""
    rounded = float(f"{value:.3g}")
    return f"{value:,.0f}" if 1000 <= abs(rounded) < 1e12 else f"{value:.3g}"


def format_suffixed(value: float) -> str:
    """Formats a count to three digits with a suffix, as it is typed: 1T, 43.4B, 4.19M."""
    rounded = float(f"{value:.3g}")
    for step, suffix in _COUNT_STEPS:
        if abs(rounded) >= step:
            return f"{format_digits(rounded / step)}{suffix}"
    return format_digits(rounded)


def format_seconds(seconds: float) -> str:
    """Formats a short time in the largest unit in which it is at least one."""
    return _format(seconds, _TIME_STEPS, "s")


def format_duration(seconds: float) -> str:
    """Formats a duration in its two largest units, such as ``2 h 5 min``."""
    for (large, name), (small, rest_name) in itertools.pairwise(_DURATION_STEPS):
        # Rounded before it is split: 59 min 59.9 s is an hour.
        whole, rest = divmod(round(seconds / small), large // small)
        if whole:
            return f"{whole} {name} {rest} {rest_name}" if rest else f"{whole} {name}"
    return f"{seconds:.0f} s"


def _format(value: float, steps: Iterable[tuple[float, str]], unit: str) -> str:
    # Rounded before the unit is chosen: 999.9 million is a billion to three digits.
    value = float(f"{value:.3g}")
    for step, name in steps:
        if abs(value) >= step:
            return f"{format_digits(value / step)} {name}"
    return f"{value:.3g} {unit}"
