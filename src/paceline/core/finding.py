"""What was found in measurements or runs: named, with its figures and what to do about it."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One observation that a reader, or a program, may act on."""

    name: str
    """Stable identifier, so that a program may look for it."""
    message: str
    """What was seen, in one sentence with its figures."""
    remedy: str = ""
    """What to do about it; empty where nothing needs doing."""
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The figures of the message, named like metrics, units in their names."""

    @property
    def text(self) -> str:
        """The finding as prose: what was seen, then what to do about it."""
        separator = " " if self.message.endswith(".") else "; "
        return f"{self.message}{separator}{self.remedy}" if self.remedy else self.message

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"
