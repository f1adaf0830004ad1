"""Names of the collectives that Paceline measures and accounts for."""

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
"""The last two are the reduce-scatter and all-gather of the sharded containers, implemented with
the cheapest calls of the backend."""
