"""The memory tier of a run: saved often, loaded first, and never a reason to end the run."""

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
"""What the first rank says of itself: the newest step on disk when it saved to memory."""


class MemoryTier:
    """Keeps the newest state of a run in its hosts' memory; all ranks make one, and call it alike.

    Args:
        root: A directory of a tmpfs on each host.
        checkpoints: The run's directory of checkpoints.
    """

    def __init__(self, root: str, checkpoints: str) -> None:
        self.notices: list[str] = []
        """What the user should know of; the same on all ranks."""
        self._has_failed = False
        self._checkpointer: MemoryCheckpointer | None = None
        try:
            self._checkpointer = MemoryCheckpointer(root, checkpoints)
        except CheckpointError as error:
            self.notices.append(f"checkpoints in memory are off: {error}")

    def save(
        self, step: int, state: dict[str, Any], identity: Json, of_rank: Json, on_disk: int
    ) -> None:
        """Keeps a state in memory; what fails is said once, and the next is tried.

        Args:
            step: How many steps the state has taken.
            state: As a checkpoint has it.
            identity: What the run says of itself.
            of_rank: What this rank says of itself.
            on_disk: The newest step on disk.
        """
        if self._checkpointer is None:
            return
        try:
            self._checkpointer.wait()
            self._has_failed = False
        except CheckpointError as error:  # Of the save before.
            if not self._has_failed:
                self.notices.append(f"checkpoint not saved in memory, training continues: {error}")
            self._has_failed = True
        self._checkpointer.save(step, state, identity, {**of_rank, _ON_DISK: on_disk})

    def load(self, load: Callable[[Source], None], on_disk: int) -> Restored | None:
        """Loads the newest state in memory, unless there is a newer one on disk.

        Args:
            load: Takes what it needs from a source, on all ranks alike.
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
        """Gives up what is held, for a run that goes back to a state before it."""
        if self._checkpointer is not None:
            with contextlib.suppress(CheckpointError):
                self._checkpointer.wait()
            self._checkpointer.forget_others(None)

    def finish(self) -> None:
        """Gives the memory back."""
        if self._checkpointer is not None:
            with contextlib.suppress(CheckpointError):
                self._checkpointer.finish()


def _is_wanted(manifest: Manifest, on_disk: int) -> str:
    """Returns why a state in memory shall not be loaded; empty if it shall."""
    if manifest.step < on_disk:
        return f"step {on_disk} on disk is newer"
    saved_beside = json.loads(bytes(manifest.ranks[0]))[_ON_DISK]
    if saved_beside > on_disk:
        return f"step {saved_beside}, which was on disk when it was saved, was removed"
    return ""
