"""Results that show their working: what was assumed, each formula, and the numbers put in.

A figure without its working cannot be checked, and most wrong answers to questions of memory and
bandwidth differ from the right ones by an assumption that nobody wrote down.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
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
