"""Collectives of objects that a simulated group lacks, by means of those that it has."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Gives one rank the objects of all; raises as torch does unless that rank alone has a list."""
    if group_dst is None:
        group_dst = dist.get_group_rank(group or dist.group.WORLD, dst or 0)
    if (dist.get_rank(group) == group_dst) != (object_gather_list is not None):
        raise ValueError("only the destination gives a list for the gathered objects")
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, obj, group=group)
    if object_gather_list is not None:
        object_gather_list[:] = gathered


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None,
    src: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Gives each rank its object of a list that one rank has."""
    sent = [scatter_object_input_list]
    dist.broadcast_object_list(sent, src=src, group=group)
    assert sent[0] is not None
    scatter_object_output_list[0] = sent[0][dist.get_rank(group)]


@contextlib.contextmanager
def object_collectives() -> Iterator[None]:
    """Replaces torch's collectives of objects by these."""
    with (
        mock.patch.object(dist, "gather_object", gather_object),
        mock.patch.object(dist, "scatter_object_list", scatter_object_list),
    ):
        yield
