"""Tracks which parameters had a gradient on any rank.

Ranks exchange this in one small message per backward pass, sent after the last bucket, or one per
bucket if buckets step in backward. Reading the result waits for the device. A rank reads it only
for parameters without a gradient of its own, and only once per optimizer step, regardless of the
number of passes.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.ranks.pending import Pending
from paceline.parallel.zero.flat_parameters import FlatParameters


class UsedParameters:
    """Counts, for each parameter, the ranks that had a gradient.

    Args:
        num_parameters: Number of tracked parameters.
        device: Device of the collectives.
    """

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._num_parameters = num_parameters
        self._device = device
        self._missing: list[int] = []
        self._passes: list[tuple[Tensor, Pending]] = []

    def note_missing(self, parameter: int) -> None:
        """Records that this rank has no gradient for a parameter in this pass."""
        self._missing.append(parameter)

    def start(self, group: dist.ProcessGroup) -> None:
        """Starts the all-reduce of this pass's counts."""
        counts = torch.ones(self._num_parameters, device=self._device)
        for parameter in self._missing:
            counts[parameter] = 0
        self._missing = []
        work = dist.all_reduce(counts, group=group, async_op=True)
        pending = Pending("count of gradients", counts.nbytes, [work], self._device)
        self._passes.append((counts, pending))

    def decide_gradients(self, flats: Sequence[FlatParameters]) -> None:
        """Sets the gradient of undecided shards that had one on any rank.

        Waits for the device only if there are undecided shards.
        """
        undecided = [item for flat in flats for item in flat.undecided.items()]
        if undecided:
            answers = self._had_gradients([place for _, (place, _) in undecided])
            for (shard, (_, total)), had_one in zip(undecided, answers, strict=True):
                if had_one:
                    shard.tensor.grad = total
        for flat in flats:
            flat.undecided.clear()
        self.forget()

    def _had_gradients(self, parameters: Sequence[int]) -> list[bool]:
        """Returns whether any rank had a gradient for each parameter in any recorded pass."""
        counts = []
        for of_pass, pending in self._passes:
            pending.wait()
            counts.append(of_pass[list(parameters)])
        answers: list[bool] = (torch.stack(counts).sum(0) > 0).tolist()
        return answers

    def forget(self) -> None:
        """Discards the recorded passes, after waiting for their messages."""
        for _, pending in self._passes:
            pending.wait()
        self._passes = []
