"""Who takes part in a step, as every replica sees it."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Members:
    """Who takes part in a step."""

    rank: int
    """This replica among them."""
    live: int
    """How many there are."""
    has_healed: bool
    """Whether this replica has just got the state of another."""
