"""Copies each rank's files to the memory of the rank that keeps its replica."""

import torch
import torch.distributed as dist

from paceline.training.checkpoint.agreement import require_all
from paceline.training.checkpoint.format.manifest import Manifest
from paceline.training.checkpoint.memory.hosts import Hosts
from paceline.training.checkpoint.memory.messages import Messages
from paceline.training.checkpoint.places.memory import MemoryPlace


def send_replicas(
    place: MemoryPlace, manifest: Manifest, hosts: Hosts, group: dist.ProcessGroup | None
) -> None:
    """Sends this rank's files to its keeper, and receives those that it keeps.

    All ranks must call it. If a host has no space for replicas, all ranks raise before anything is
    sent.

    Args:
        place: Checkpoints in this host's memory.
        manifest: Manifest of an attempt that all ranks have written.
        hosts: Determines who keeps whose replica.
        group: Process group of all ranks; None for a single rank.
    """
    if group is None:
        return
    kept = [file for file in manifest.files if hosts.keeper(file.rank) == hosts.rank]
    rooms = {}

    def reserve() -> None:
        for file in kept:
            rooms[file.name] = place.reserve(
                manifest.step, manifest.save_id, file.name, file.num_bytes
            )

    require_all(reserve, group)
    messages = Messages(group)
    for file in manifest.files:
        keeper = hosts.keeper(file.rank)
        if file.rank == hosts.rank and keeper is not None:
            path = place.own_file(manifest.step, manifest.save_id, file.name)
            messages.send(_mapped(path, file.num_bytes, is_written=False), keeper)
        if keeper == hosts.rank:
            messages.receive(_mapped(rooms[file.name], file.num_bytes, is_written=True), file.rank)
    messages.wait()


def _mapped(path: object, num_bytes: int, *, is_written: bool) -> torch.Tensor:
    """Returns the bytes of a file, mapped into memory without a copy."""
    return torch.from_file(str(path), shared=is_written, size=num_bytes, dtype=torch.uint8)
