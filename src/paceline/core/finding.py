"""Findings about measurements or runs: a name, the figures and a remedy."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One observation that a reader or a program can act on."""

    name: str
    """Stable identifier that programs can match."""
    message: str
    """The observation in one sentence, with its figures."""
    remedy: str = ""
    """The recommended action; empty if none is needed."""
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The figures of the message, named like metrics, with units in their names."""

    @property
    def text(self) -> str:
        """The finding as prose: the observation, then the remedy."""
        separator = " " if self.message.endswith(".") else "; "
        return f"{self.message}{separator}{self.remedy}" if self.remedy else self.message

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"
