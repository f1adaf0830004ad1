"""Collectives with which ranks agree on results and errors before any of them acts."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def from_first(function: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Returns the first rank's result of a function on all ranks, or raises its error on all."""
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def from_all(own: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the value of each rank, by rank."""
    if not dist.is_initialized():
        return [own]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def require_all(function: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Calls a function on all ranks; raises the first failing rank's error on all of them."""
    failure: Exception | None = None
    try:
        function()
    except Exception as error:
        failure = error
    for found in from_all(failure, group):
        if found is not None:
            raise found
