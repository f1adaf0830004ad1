"""Which parameters any rank had a gradient for.

Ranks tell each other in one small message per backward pass, sent behind the last bucket; in one
per bucket where buckets step in backward. Most never look at it: only where this rank itself had no
gradient is there anything to find out, and that is asked once per optimizer step, however many
passes there were. Asking waits for the device.
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
        num_parameters: How many are trained.
        device: Where to communicate from.
    """

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._num_parameters = num_parameters
        self._device = device
        self._missing: list[int] = []
        self._passes: list[tuple[Tensor, Pending]] = []

    def note_missing(self, parameter: int) -> None:
        """Notes that this rank has no gradient for a parameter in this pass."""
        self._missing.append(parameter)

    def start(self, group: dist.ProcessGroup) -> None:
        """Starts to count this pass over the ranks."""
        counts = torch.ones(self._num_parameters, device=self._device)
        for parameter in self._missing:
            counts[parameter] = 0
        self._missing = []
        work = dist.all_reduce(counts, group=group, async_op=True)
        pending = Pending("count of gradients", counts.nbytes, [work], self._device)
        self._passes.append((counts, pending))

    def decide_gradients(self, flats: Sequence[FlatParameters]) -> None:
        """Gives a gradient to shards that only other ranks had one for; if any, asks the device."""
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
        """Returns whether any rank had a gradient for each of these in any pass that is kept."""
        counts = []
        for of_pass, pending in self._passes:
            pending.wait()
            counts.append(of_pass[list(parameters)])
        answers: list[bool] = (torch.stack(counts).sum(0) > 0).tolist()
        return answers

    def forget(self) -> None:
        """Forgets earlier passes, whose gradients nobody will ask for any more."""
        for _, pending in self._passes:
            pending.wait()
        self._passes = []
