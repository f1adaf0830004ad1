"""Results that show their work: assumptions, formulas, and the numbers substituted into them.

A figure without its derivation cannot be checked. Most wrong answers about memory and bandwidth
differ from the right ones by an unstated assumption.
"""

import dataclasses
import textwrap
from collections.abc import Mapping

_WIDTH = 80
"""Characters of a line of a terminal."""


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
        lines = [folded("", self.question, hanging=2)]
        lines += [folded("  assuming ", each) for each in self.assumptions]
        for step in self.steps:
            lines.append(folded("  ", step.formula, hanging=4))
            lines.append(folded("      with  ", step.numbers))
            lines.append(folded("      gives ", step.result))
        return "\n".join(lines)


def folded(lead: str, text: str, hanging: int = 0) -> str:
    """Returns text in lines of at most 80 characters, broken between words.

    Further lines are indented as the first after its `lead`, and by `hanging` more.
    """
    return textwrap.fill(
        text,
        width=_WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * (len(lead) + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )
