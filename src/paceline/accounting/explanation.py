"""Results that show their work: assumptions, formulas, and the numbers substituted into them.

A figure without its derivation cannot be checked. Most wrong answers about memory and bandwidth
differ from the right ones by an unstated assumption.
"""

import dataclasses
from collections.abc import Mapping


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
