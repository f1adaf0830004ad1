"""Words for figures, so that every commentary puts the same comparison the same way."""

import math
from collections.abc import Sequence

_ALIKE = 0.05
"""Figures that differ by less than this share are called about the same."""


def times(ratio: float) -> str:
    """Writes a ratio, such as ``2.5 times``."""
    return f"{ratio:.3g} times"


def compare(value: float, reference: float, *, more: str = "longer", less: str = "shorter") -> str:
    """Says how a value relates to a reference, such as ``2.5 times longer than``."""
    ratio = value / reference
    if abs(ratio - 1) < _ALIKE:
        return f"about the same ({ratio:.3g} times) as"
    if ratio > 1:
        return f"{ratio:.3g} times, {more} than"
    return f"{ratio:.3g} times, {less} than"


def verdict(measured: float, expected: float, tolerance: float) -> str:
    """Says whether a measurement agrees with a model, and by how much it is off."""
    error = measured / expected - 1
    if abs(error) <= tolerance:
        return f"agrees with the model ({error:+.1%})"
    side = "above" if error > 0 else "below"
    return f"does not agree with the model: it is {abs(error):.0%} {side} it"


def exponent(first: tuple[float, float], last: tuple[float, float]) -> float:
    """Returns the power with which y grows between two points (x, y)."""
    return math.log(last[1] / first[1]) / math.log(last[0] / first[0])


def listing(words: Sequence[str]) -> str:
    """Joins words as people do: ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
