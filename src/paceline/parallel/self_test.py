"""The smallest proof that ranks can talk here: one checked all-reduce."""

import time

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError

_NUM_ELEMENTS = 262_144


def all_reduce_self_test(rank: int, world_size: int) -> float:
    """All-reduces 1 MiB, checks every element, and returns the seconds of a warm call."""
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    expected = float(sum(range(1, world_size + 1)))
    seconds = 0.0
    for _ in range(3):
        values = torch.full((_NUM_ELEMENTS,), float(rank + 1), device=device)
        started = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        if not bool((values == expected).all()):
            raise PacelineError(
                f"rank {rank}: the all-reduce gave {values[0].item()}, expected {expected}"
            )
    return seconds
