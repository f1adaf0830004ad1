"""Results that show their working: what was assumed, each formula, and the numbers put in.

A figure without its working cannot be checked, and most wrong answers to questions of memory and
bandwidth differ from the right ones by an assumption that nobody wrote down.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paceline.core.units import format_count

_SUM, _PRODUCT, _ATOM = 1, 2, 4
"""How tightly parts of a formula bind; in between lies what stands right of - or /."""


@dataclasses.dataclass(frozen=True)
class WorkedLine:
    """One line of working."""

    formula: str
    """In symbols."""
    numbers: str
    """The same with numbers put in."""
    result: str
    """What comes out, with its unit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """A question, its answers, and how they come about."""

    question: str
    assumptions: tuple[str, ...]
    steps: tuple[WorkedLine, ...]
    values: Mapping[str, float]
    """The answers as numbers, named like metrics, units in their names."""

    def render(self) -> str:
        """Returns the working as text."""
        lines = [self.question, *(f"  assuming {assumption}" for assumption in self.assumptions)]
        for step in self.steps:
            lines.append(f"  {step.formula}")
            lines.append(f"      with  {step.numbers}")
            lines.append(f"      gives {step.result}")
        return "\n".join(lines)


class Quantity:
    """A value that knows its formula: what the code computes is what the working shows.

    Sums, differences, products and quotients of quantities compute values, numbers as well as
    arrays, and remember how. The text is made when it is asked for; `show` formats a number, or an
    array's first entry.
    """

    def __init__(self, value: Any, name: str, show: Callable[[float], str] = format_count) -> None:
        self.value = value
        self._binding = _ATOM
        self._write: Callable[[bool], str] = lambda numbers: (
            show(first_number(value)) if numbers else name
        )

    @property
    def formula(self) -> str:
        """The formula in names."""
        return self._write(False)

    @property
    def numbers(self) -> str:
        """The formula with numbers put in."""
        return self._write(True)

    def __add__(self, other: "Quantity") -> "Quantity":
        return self._combine("+", other, self.value + other.value, _SUM)

    def __sub__(self, other: int) -> "Quantity":
        return self._combine("-", Quantity(other, str(other)), self.value - other, _SUM)

    def __mul__(self, other: "Quantity") -> "Quantity":
        return self._combine("*", other, self.value * other.value, _PRODUCT)

    def __truediv__(self, other: "Quantity") -> "Quantity":
        return self._combine("/", other, self.value / other.value, _PRODUCT)

    @staticmethod
    def choose(condition: Any, chosen: "Quantity", otherwise: "Quantity") -> "Quantity":
        """Takes one where the condition holds, and the other elsewhere."""
        shown = chosen if first_number(condition) else otherwise
        result = Quantity(np.where(condition, chosen.value, otherwise.value), "")
        result._binding = min(chosen._binding, otherwise._binding)
        result._write = shown._write
        return result

    def _combine(self, operator: str, other: "Quantity", value: Any, binding: int) -> "Quantity":
        result = Quantity(value, "")
        result._binding = binding
        right = binding + (operator in "-/")
        result._write = lambda numbers: (
            f"{self._inside(numbers, binding)} {operator} {other._inside(numbers, right)}"
        )
        return result

    def _inside(self, numbers: bool, binding: int) -> str:
        text = self._write(numbers)
        return text if self._binding >= binding else f"({text})"


def first_number(value: Any) -> float:
    """Returns a number, or an array's first entry."""
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
