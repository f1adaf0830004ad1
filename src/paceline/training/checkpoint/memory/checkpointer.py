"""Saves checkpoints to host memory during a run.

A save works like one to disk, until every rank has written its files and the first rank has the
manifest. Then, on the checkpoint thread of every rank:

1. All ranks receive the manifest, and allocate space for the replicas that they keep.
2. Each rank sends its files to the rank that keeps their replica.
3. Once all replicas have arrived, the first rank of every host publishes.
4. Once all hosts have published, each removes the previous save. Two saves exist only in between.
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
    """Saves the state of a run to host memory; every rank creates one and makes the same calls.

    Args:
        root: A tmpfs directory on each host.
        checkpoints: The run's checkpoint directory, which all ranks share. Removing it also
            invalidates the checkpoints in memory.
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
        """Does nothing: `complete` has removed the previous save."""

    def forget_others(self, step: int | None) -> None:
        """Removes all steps but `step`, or all if it is None, on every host.

        All ranks must call it, while no save is in progress.
        """
        if self.hosts.is_leader:
            self.memory.remove_others(step)
        require_all(lambda: None, self.group)

    def finish(self) -> None:
        """Frees the memory; all ranks must call it when the run no longer needs it."""
        if self._saving is not None and self._saving.thread is not None:
            self._saving.thread.join()
        require_all(lambda: None, self.group)
        if self.hosts.is_leader:
            self.memory.remove_all()
        self.close()

    def close(self) -> None:
        """Destroys the group; checkpoints in memory stay there."""
        super().close()
        self.memory.close()

    def _publish(self, step: int, save_id: str, manifest: bytes) -> None:
        if self.hosts.is_leader:
            self.memory.publish_here(step, save_id, manifest)
        else:
            self.memory.release(step, save_id)
