"""Frameworks with the same kernels, whose runs say something about each other.

A pool of runs is fitted by itself (`fit`), or drawn from what all frameworks share, by its runs and
those of its relatives. `studies/planner/known.py` compares both ways, with models held out.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.planner.calibrations.cases import Case, Variant
from paceline.planner.calibrations.prior import PooledPrior, Posterior

DRAWN = (
    *("megatron-bridge", "nemo-blackwell", "paxml-a100-sxm-80gb", "paxml-h100-sxm"),
    *("torchtitan", "vtrain"),
)
"""Pools whose other models are predicted better from what all frameworks share."""
_RELATIVES: dict[str, tuple[str, ...]] = {
    "torchtitan": ("llm-foundry", "fms-fsdp"),
    "megatron-bridge": ("nemo",),
    "nemo": ("nemo",),
    "vtrain": ("vtrain-host",),
    "vtrain-host": ("vtrain",),
}
"""By family. A family's own pools, of other devices, are relatives too."""
_ROWS_OF_RELATIVES = 30.0
"""Number of own rows that all rows of relatives together count as."""


def relatives_of(cases: Sequence[Case], everything: Iterable[Case]) -> list[Case]:
    """Returns the runs of a pool's relatives; empty if it has none."""
    first = cases[0]
    families = _RELATIVES.get(first.family, ())
    return [
        case
        for case in everything
        if case.family in families
        and case.pool != first.pool
        and (case.experts is None) == (first.experts is None)
    ]


def fit_with_relatives(
    prior: PooledPrior,
    own: Sequence[Case],
    relatives: Sequence[Case] = (),
    *,
    also: Sequence[Variant] = (),
) -> Posterior:
    """Returns the constants of a pool given its runs and those of its relatives."""
    weights = np.ones(len(own) + len(relatives))
    if relatives:
        weights[len(own) :] = min(1.0, _ROWS_OF_RELATIVES / len(relatives))
    return prior.fit([*own, *relatives], weights=weights, also=also)
