"""The participants of a step, from the perspective of one replica."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Members:
    """The participants of a step."""

    rank: int
    """Index of this replica among the participants."""
    live: int
    """Number of participants."""
    has_healed: bool
    """Whether this replica has just received the state of another."""
