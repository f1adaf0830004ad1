"""In-memory checkpoints of a run: saved often and loaded first; failed saves do not end the run."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

from paceline.core.units import format_binary_bytes
from paceline.training.checkpoint.agreement import from_all
from paceline.training.checkpoint.errors import CheckpointError
from paceline.training.checkpoint.format.manifest import Json, Manifest
from paceline.training.checkpoint.memory.checkpointer import MemoryCheckpointer
from paceline.training.checkpoint.memory.restore import load_newest_held
from paceline.training.checkpoint.restore import Restored, Source

_ON_DISK = "on_disk"
"""Key in a rank's metadata: the newest step on disk when the rank saved to memory."""


class MemoryTier:
    """Keeps the newest state of a run in host memory.

    Every rank creates one and makes the same calls.

    Args:
        root: A tmpfs directory on each host.
        checkpoints: The run's checkpoint directory.
    """

    def __init__(self, root: str, checkpoints: str) -> None:
        self.notices: list[str] = []
        """Messages for the user; the same on all ranks."""
        self._has_failed = False
        self._checkpointer: MemoryCheckpointer | None = None
        try:
            self._checkpointer = MemoryCheckpointer(root, checkpoints)
        except CheckpointError as error:
            self.notices.append(f"checkpoints in memory are off: {error}")

    def save(
        self, step: int, state: dict[str, Any], identity: Json, of_rank: Json, on_disk: int
    ) -> None:
        """Saves a state in memory; failures are reported once, and the next save is still tried.

        Args:
            step: Number of steps that the state was trained for.
            state: State, as in a checkpoint on disk.
            identity: Metadata of the run.
            of_rank: Metadata of this rank.
            on_disk: The newest step on disk.
        """
        if self._checkpointer is None:
            return
        try:
            self._checkpointer.wait()
            self._has_failed = False
        except CheckpointError as error:  # From the previous save.
            if not self._has_failed:
                self.notices.append(f"checkpoint not saved in memory, training continues: {error}")
            self._has_failed = True
        self._checkpointer.save(step, state, identity, {**of_rank, _ON_DISK: on_disk})

    def load(self, load: Callable[[Source], None], on_disk: int) -> Restored | None:
        """Loads the newest state in memory, unless a newer one is on disk.

        Args:
            load: Loads what it needs from a source, the same on all ranks.
            on_disk: The newest step on disk; negative if there is none.
        """
        if self._checkpointer is None:
            return None

        def is_wanted(manifest: Manifest) -> str:
            return _is_wanted(manifest, on_disk)

        found = load_newest_held(self._checkpointer, load, is_wanted)
        step = None if found.restored is None else found.restored.step
        self._checkpointer.forget_others(step)
        self.notices += [f"memory: {finding.message}" for finding in found.findings]
        if found.restored is not None:
            received = sum(from_all(found.received_bytes, self._checkpointer.group))
            others = f", {format_binary_bytes(received)} from other hosts" if received else ""
            self.notices.append(f"step {step} was restored from memory{others}")
        elif on_disk < 0 and any(finding.name == "damaged" for finding in found.findings):
            raise CheckpointError(
                "the checkpoint in memory is corrupted and there is none on disk: "
                f"{found.findings[0].message}; it was removed: run the same command again to "
                "start from the beginning"
            )
        return found.restored

    def forget(self) -> None:
        """Discards all states in memory, for a run that rolls back to an earlier state."""
        if self._checkpointer is not None:
            with contextlib.suppress(CheckpointError):
                self._checkpointer.wait()
            self._checkpointer.forget_others(None)

    def finish(self) -> None:
        """Frees the memory."""
        if self._checkpointer is not None:
            with contextlib.suppress(CheckpointError):
                self._checkpointer.finish()


def _is_wanted(manifest: Manifest, on_disk: int) -> str:
    """Returns why a state in memory must not be loaded; empty if it may be."""
    if manifest.step < on_disk:
        return f"step {on_disk} on disk is newer"
    saved_beside = json.loads(bytes(manifest.ranks[0]))[_ON_DISK]
    if saved_beside > on_disk:
        return f"step {saved_beside}, which was on disk when it was saved, was removed"
    return ""
