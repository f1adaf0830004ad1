"""The smallest proof that ranks can talk here: one checked all-reduce."""

import time

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.parallel.ranks.device_clock import synchronize

_NUM_ELEMENTS = 262_144
_REPETITIONS = 6


def all_reduce_self_test(rank: int, world_size: int) -> list[float]:
    """All-reduces 1 MiB a few times, checks every element, and returns the seconds of each."""
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    expected = float(sum(range(1, world_size + 1)))
    seconds = []
    for _ in range(_REPETITIONS):
        values = torch.full((_NUM_ELEMENTS,), float(rank + 1), device=device)
        dist.barrier()
        synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(values)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        if not bool((values == expected).all()):
            raise PacelineError(
                f"rank {rank}: the all-reduce gave {values[0].item()}, expected {expected}"
            )
    # The first one sets the connection up.
    return seconds[1:]
