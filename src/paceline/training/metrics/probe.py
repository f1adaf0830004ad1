"""Samples step metrics that are expensive to measure, every few steps."""

import dataclasses

import torch
from torch import nn

from paceline.core.host_memory import resident_bytes
from paceline.parallel.strategies import record_statistics, synchronization_stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """Sampled metrics of a step; None if not sampled or not available."""

    exposed_communication_s: float | None = None
    memory_bytes: int | None = None


class StepProbe:
    """Samples every n-th step.

    Args:
        model: The model, wrapped by its strategy.
        device: Device to compute on.
        every_steps: Steps between samples.
        enabled: Whether this rank samples at all.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, every_steps: int, *, enabled: bool = True
    ) -> None:
        self._model = model
        self._device = device
        self._every_steps = every_steps
        self._is_enabled = enabled

    def prepare(self, step: int) -> None:
        """Enables communication statistics for the steps to be sampled, and only for these."""
        if self._is_enabled:
            record_statistics(self._model, self._is_due(step))

    def look(self, step: int) -> Look:
        """Returns the metrics of the step that just ended, if it is to be sampled."""
        if not self._is_enabled or not self._is_due(step):
            return Look()
        stats = synchronization_stats(self._model)
        return Look(
            exposed_communication_s=None if stats is None else stats.exposed_wait_s,
            memory_bytes=memory_in_use_bytes(self._device),
        )

    def _is_due(self, step: int) -> bool:
        return step % self._every_steps == 0


def memory_in_use_bytes(device: torch.device) -> int:
    """Returns the peak of a GPU's tensors since the start, or this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_bytes()
