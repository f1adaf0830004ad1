"""Checks whether the ranks' memory can fit, before the kernel kills one of them.

The check uses a lower bound: parameters, gradients and optimizer state of all strategies that are
held at the same time. If the bound does not fit, the case cannot run. If it fits, the case may
still run out of memory for activations.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from paceline.accounting.memory.model_states import rank_state_bytes
from paceline.benchmarks.harness.ranks import MeasuringRanks
from paceline.benchmarks.step.config import StepCase
from paceline.core.specs import precision_preset
from paceline.core.strategies import StrategyName
from paceline.core.units import format_binary_bytes
from paceline.parallel.ranks.hardware import usable_memory_bytes
from paceline.records.links import link_case_fields


def memory_obstacle(
    ranks: MeasuringRanks, case: StepCase, strategies: Sequence[StrategyName]
) -> str | None:
    """Returns why these strategies cannot fit at the same time; None if they may.

    Every rank must call it, and all get the same answer.
    """
    usable: int | None = ranks.run(least_usable_bytes)
    needed = _needed_bytes(ranks, case, strategies)
    if usable is None or needed <= usable:
        return None
    shared = "a GPU" if ranks.topology["device"] == "cuda" else "the ranks of a host"
    return (
        f"{shared} would need at least {format_binary_bytes(needed)}, but only "
        f"{format_binary_bytes(usable)} may be used; use a smaller --model or fewer --strategies"
    )


def least_usable_bytes(device: torch.device) -> int | None:
    """Returns the least usable memory of any rank; None if it is unknown on some rank."""
    usable = usable_memory_bytes(device)
    least = torch.tensor(-1 if usable is None else usable, dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return None if least.item() < 0 else int(least.item())


def _needed_bytes(ranks: MeasuringRanks, case: StepCase, strategies: Sequence[StrategyName]) -> int:
    """Returns a lower bound for the fullest GPU, or for the fullest host."""
    by_rank = np.zeros(ranks.world_size, dtype=np.int64)
    for strategy in strategies:
        precision = precision_preset(case.precision)
        states = rank_state_bytes(case.shape, precision, strategy, ranks.world_size)
        by_rank += states.parameters + states.gradients + states.optimizer_state
    if ranks.topology["device"] == "cuda":
        return int(by_rank.max())
    # The lab's hosts are virtual and share one memory; of real hosts, one has at least the mean.
    num_hosts = 1 if link_case_fields() else int(ranks.topology["num_hosts"] or 1)
    return int(by_rank.sum()) // num_hosts
