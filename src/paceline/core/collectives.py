"""The collectives that Paceline measures and accounts for, by name."""

from typing import Literal

Operation = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "reduce_to_owners",
    "gather_from_owners",
]
"""The last two are what sharded containers do: a reduce-scatter and an all-gather, by those calls
that cost least on the backend."""
