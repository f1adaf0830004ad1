"""Finds where values stopped being finite, after a step that no rank has applied.

The step is recomputed with its unchanged parameters, while hooks check the output of every module
and the gradient of that output. All ranks take part, because strategies that shard parameters
communicate in every pass.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.buckets import local_tensor

_MOST_RANKS = 4
"""Maximum number of ranks that a message names."""


def explain_nonfinite(module: nn.Module, compute: Callable[[], object], what: str) -> str:
    """Recomputes a step; returns the ranks and modules where it first became non-finite.

    Args:
        module: The unwrapped model.
        compute: Runs the forward and backward passes of this rank.
        what: Describes the samples of this rank.
    """
    with _watched(module) as found:
        compute()
    own = f"rank {dist.get_rank()} ({what}): {found[0]}" if found else None
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, own)
    wrong = [report for report in reports if report is not None]
    if not wrong:
        return "everything was finite when computed again: suspect faulty hardware of a rank"
    more = f"; and {len(wrong) - _MOST_RANKS} more ranks" if len(wrong) > _MOST_RANKS else ""
    return "; ".join(wrong[:_MOST_RANKS]) + more


@contextlib.contextmanager
def _watched(module: nn.Module) -> Iterator[list[str]]:
    """Yields a list that collects non-finite outputs and gradients, in order of occurrence."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def look(_module: nn.Module, _inputs: object, output: object) -> None:
            if not isinstance(output, Tensor):
                return
            if not _is_finite(output):
                found.append(f"the output of {name} is the first that is not finite")
            if output.requires_grad:
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: look_back(name, gradient)
                )

        return look

    def look_back(name: str, gradient: Tensor) -> None:
        if not _is_finite(gradient):
            found.append(f"the gradient of {name}'s output is the first that is not finite")

    hooks = [
        each.register_forward_hook(watch(name or "the model"))
        for name, each in module.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(local_tensor(values)).all())
