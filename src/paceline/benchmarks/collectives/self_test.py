"""The smallest proof that ranks can talk here: one checked all-reduce."""

import torch
import torch.distributed as dist

from paceline.benchmarks.collectives.measure import Collective, time_call
from paceline.core.units import MIB

_REPETITIONS = 5


def all_reduce_self_test(rank: int, _world_size: int) -> list[float]:
    """All-reduces 1 MiB, checks every element, and returns the seconds of a few more."""
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    collective = Collective("all_reduce", MIB, device)
    collective.check()  # Sets the connection up, too.
    collective.reset()
    return [time_call(collective, device) for _ in range(_REPETITIONS)]
