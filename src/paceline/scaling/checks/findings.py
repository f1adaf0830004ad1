"""What is wrong with a sweep, a fit or an answer: named, with the numbers and what to do."""

import dataclasses
from typing import Literal

FindingName = Literal[
    "coarse_sizes",
    "far_extrapolation",
    "flops_counting",
    "inconsistent_compute",
    "irreducible_dominates",
    "loose_optimiser",
    "methods_disagree",
    "minimum_at_edge",
    "misspecified_surface",
    "outlying_runs",
    "parabola_bias",
    "rounded_coefficients",
    "runs_left_out",
    "too_few_budgets",
    "too_few_sizes",
    "unannealed_curves",
    "undetermined",
    "wrong_size",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One pitfall that was met."""

    name: FindingName
    """Which one; stable, so that a program may look for it."""
    message: str
    """What was seen, with its numbers."""
    remedy: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.name}: {self.message}; {self.remedy}"
