"""The collectives that Paceline measures and accounts for, by name."""

from typing import Literal

Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"
]
