"""Results that show their work: assumptions, formulas, and the numbers substituted into them.

A figure without its derivation cannot be checked. Most wrong answers about memory and bandwidth
differ from the right ones by an unstated assumption.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paceline.core.units import format_count

_SUM, _PRODUCT, _ATOM = 1, 2, 4
"""Precedence of operators in a formula; the right operand of - or / needs one more."""


@dataclasses.dataclass(frozen=True)
class WorkedLine:
    """One line of a derivation."""

    formula: str
    """The formula in symbols."""
    numbers: str
    """The formula with numbers substituted."""
    result: str
    """The result, with its unit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """A question, its answers, and their derivation."""

    question: str
    assumptions: tuple[str, ...]
    steps: tuple[WorkedLine, ...]
    values: Mapping[str, float]
    """The answers as numbers, named like metrics, units in their names."""

    def render(self) -> str:
        """Returns the derivation as text."""
        lines = [self.question, *(f"  assuming {assumption}" for assumption in self.assumptions)]
        for step in self.steps:
            lines.append(f"  {step.formula}")
            lines.append(f"      with  {step.numbers}")
            lines.append(f"      gives {step.result}")
        return "\n".join(lines)


class Quantity:
    """A value with its formula, so that the derivation shown is the one computed.

    Sums, differences, products and quotients of quantities compute on numbers or arrays, and record
    the formula. Text is built on demand; `show` formats a number, or an array's first entry.
    """

    def __init__(self, value: Any, name: str, show: Callable[[float], str] = format_count) -> None:
        self.value = value
        self._binding = _ATOM
        self._write: Callable[[bool], str] = lambda numbers: (
            show(first_number(value)) if numbers else name
        )

    @property
    def formula(self) -> str:
        """The formula in symbols."""
        return self._write(False)

    @property
    def numbers(self) -> str:
        """The formula with numbers substituted."""
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
        """Returns `chosen` where the condition holds, and `otherwise` elsewhere."""
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
