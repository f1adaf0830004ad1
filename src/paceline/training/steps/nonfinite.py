"""Where numbers stopped being finite: looked for after a step that no rank has taken.

The step is computed again, as its parameters are still what they were, with a look at every
module's output and at the gradient that comes back to it. All ranks take part, because strategies
that shard parameters communicate in every pass.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.buckets import local_tensor

_MOST_RANKS = 4
"""Ranks that a message names one by one."""


def explain_nonfinite(module: nn.Module, compute: Callable[[], object], what: str) -> str:
    """Computes a step again and returns which ranks and modules it first went wrong on.

    Args:
        module: The model itself.
        compute: Does the forward and backward passes of this rank.
        what: What this rank computes them of.
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
    """Yields a list that grows by each output and gradient that is not finite, the first first."""
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
