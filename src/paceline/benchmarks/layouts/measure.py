"""Training steps under several layouts, interleaved on the same ranks.

Every layout gets its own model, from the same seed, and the same global batch. A step's time is
that of the slowest rank, its memory that of the fullest.
"""

import dataclasses

import torch

from paceline.benchmarks.harness.turns import Turns, hold
from paceline.benchmarks.layouts.config import LayoutCase
from paceline.benchmarks.layouts.step import LayoutStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """Results of one layout, identical on all ranks."""

    samples: dict[str, list[float]]
    peak_bytes: int


class LayoutComparison(Turns):
    """All layouts of one case on one rank.

    Args:
        case: The model, the batch and the layouts.
        device: The device that this rank computes on.
    """

    def __init__(self, case: LayoutCase, device: torch.device) -> None:
        self._steps = [LayoutStep(case, written, device) for written in case.layouts]
        super().__init__(self._steps, device)

    def results(self) -> list[LayoutResult]:
        """Measures memory, and combines the measurements of all ranks."""
        return [
            LayoutResult(
                samples={name: self.largest(values) for name, values in samples.items()},
                peak_bytes=int(self.largest([float(step.peak_bytes())])[0]),
            )
            for step, samples in zip(self._steps, self.samples, strict=True)
        ]


def prepare(device: torch.device, case: LayoutCase) -> None:
    """Builds all layouts of a case on this rank."""
    hold(lambda: LayoutComparison(case, device))
