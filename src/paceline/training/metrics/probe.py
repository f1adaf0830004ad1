"""What costs something to know of a step, looked at every few steps."""

import dataclasses

import torch
from torch import nn

from paceline.core.host_memory import resident_bytes
from paceline.parallel.strategies import record_statistics, synchronization_stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen of a step; None where nobody looked, or nothing can be seen."""

    exposed_communication_s: float | None = None
    memory_bytes: int | None = None


class StepProbe:
    """Looks at one step in so many.

    Args:
        model: As its strategy has wrapped it.
        device: Where it computes.
        every_steps: Steps between looks.
        enabled: Whether this rank looks at all.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, every_steps: int, *, enabled: bool = True
    ) -> None:
        self._model = model
        self._device = device
        self._every_steps = every_steps
        self._is_enabled = enabled

    def prepare(self, step: int) -> None:
        """Has the moments of a step's communication kept if it is one to look at."""
        if self._is_enabled:
            record_statistics(self._model, self._is_due(step))

    def look(self, step: int) -> Look:
        """Returns what is to be seen of a step that has just ended, if it is one to look at."""
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
    """Returns the peak of a GPU's tensors since the start, or what this process has resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_bytes()
