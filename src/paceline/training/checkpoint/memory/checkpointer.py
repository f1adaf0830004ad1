"""Saving to memory, in the course of a run.

As a save to a disk, up to the point where every rank has written its files and the first one has
the manifest. Then, on the thread of every rank:

1. All ranks receive the manifest, and make room for the replicas that they keep.
2. Each sends its files to its keeper.
3. When all have what they keep, the first rank of every host publishes.
4. When all hosts have published, each removes the save before: one stays, two are there meanwhile.
"""

import pathlib

import torch.distributed as dist

from paceline.training.checkpoint.agreement import from_first, require_all
from paceline.training.checkpoint.checkpointer import Checkpointer, new_group
from paceline.training.checkpoint.errors import CheckpointError
from paceline.training.checkpoint.format.manifest import decode_manifest
from paceline.training.checkpoint.memory.hosts import find_hosts
from paceline.training.checkpoint.memory.replicas import send_replicas
from paceline.training.checkpoint.places.memory import MemoryPlace, run_token

_TOKEN = "memory-token"


class MemoryCheckpointer(Checkpointer):
    """Saves a run's state to its hosts' memory; all ranks make one and call it alike.

    Args:
        root: A directory of a tmpfs on each host.
        checkpoints: The run's directory of checkpoints, which all ranks see. When it is removed,
            what is in memory is forgotten with it.
    """

    def __init__(self, root: str, checkpoints: str) -> None:
        token_file = pathlib.Path(checkpoints).absolute() / _TOKEN
        places: list[MemoryPlace] = []
        group = new_group()
        try:
            token = from_first(lambda: run_token(token_file), group)
            require_all(lambda: places.append(MemoryPlace(root, str(token_file), token)), group)
        except CheckpointError:
            if group is not None:
                dist.destroy_process_group(group)
            raise
        super().__init__(places[0], group=group)
        self.memory = places[0]
        self.hosts = find_hosts(self.memory.host, self.group)
        if self.hosts.is_leader:
            self.memory.sweep()

    def complete(self, step: int, save_id: str) -> None:
        """Sends replicas and publishes on all hosts."""
        content = from_first(lambda: self.memory.manifest, self.group)
        manifest = decode_manifest(content, self.memory.url)
        send_replicas(self.memory, manifest, self.hosts, self.group)
        require_all(lambda: None, self.group)
        require_all(lambda: self._publish(step, save_id, content), self.group)
        if self.hosts.is_leader:
            self.memory.remove_others(step)

    def retain(self) -> None:
        """Has nothing left to remove."""

    def forget_others(self, step: int | None) -> None:
        """Removes all steps but one, or all, on every host; all ranks call it, and none saves."""
        if self.hosts.is_leader:
            self.memory.remove_others(step)
        require_all(lambda: None, self.group)

    def finish(self) -> None:
        """Gives the memory back; all ranks call it when the run needs it no more."""
        if self._saving is not None and self._saving.thread is not None:
            self._saving.thread.join()
        require_all(lambda: None, self.group)
        if self.hosts.is_leader:
            self.memory.remove_all()
        self.close()

    def close(self) -> None:
        """Gives up the group; what is in memory stays there."""
        super().close()
        self.memory.close()

    def _publish(self, step: int, save_id: str, manifest: bytes) -> None:
        if self.hosts.is_leader:
            self.memory.publish_here(step, save_id, manifest)
        else:
            self.memory.release(step, save_id)
