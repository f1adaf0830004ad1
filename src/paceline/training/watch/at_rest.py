"""Checks that a rank's weights and optimizer state are unchanged since its last update.

Nothing may change them between two updates. A flipped bit therefore identifies its rank, even if
no other rank has a copy.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.training.build import Trainee
from paceline.training.watch.digest import digests
from paceline.training.watch.held import held_tensors


class AtRest:
    """Keeps hashes of this rank's state from one update to the next.

    Args:
        trainee: The model and its optimizers.
        device: Device to compute on.
    """

    def __init__(self, trainee: Trainee, device: torch.device) -> None:
        self._trainee = trainee
        self._device = device
        self._hashes: Tensor | None = None
        self._damaged: str | None = None

    def keep(self) -> None:
        """Hashes this rank's state after an update or a load."""
        self._damaged = None
        self._hashes = digests([each.values for each in held_tensors(self._trainee)], self._device)

    def is_damaged(self) -> bool:
        """Returns whether the state has changed since `keep`."""
        if self._hashes is None:
            return False
        held = held_tensors(self._trainee)
        now = digests([each.values for each in held], self._device)
        differing = (now != self._hashes).nonzero().flatten().tolist()
        if differing:
            self._damaged = held[differing[0]].name
        return bool(differing)

    def explain(self) -> str:
        """Returns the corrupted ranks and tensors, the same on all ranks; all must call it."""
        own = f"rank {dist.get_rank()}: {self._damaged} has changed since the last update"
        reports: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own if self._damaged else None)
        return "; ".join(report for report in reports if report is not None)
