"""Saves checkpoints during a run, synchronously or while training continues.

An asynchronous save, on every rank:

1. `save` waits for the previous save, and starts a thread.
2. The thread plans with the other ranks over a separate process group, so that its messages do not
   mix with those of training. It then copies this rank's part to host memory, and `save` returns.
3. The thread writes. The first rank publishes, and removes checkpoints that are no longer kept.

A failure of the thread is the same on all ranks, but they learn of it at different times. `failed`
reports it without waiting, so that ranks can agree on it between steps. `wait` raises it on all.
"""

import datetime
import os
import threading
import time
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from paceline.checkpoint.catalog import keep_last
from paceline.checkpoint.dcp import JsonSavePlanner, encode_json, named_failures
from paceline.checkpoint.dcp_writer import (
    DEFAULT_FILE_BYTES,
    CheckpointWriter,
    HostBuffers,
    PendingSave,
)
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.format import Json
from paceline.checkpoint.storage import CheckpointStorage, open_checkpoints

GROUP_TIMEOUT = datetime.timedelta(minutes=30)
"""Timeout of messages about checkpoints."""


class Checkpointer:
    """Saves the state of a run; every rank creates one and makes the same calls.

    Args:
        location: A directory that all ranks share, ``s3://bucket/prefix``, or an open location.
        keep: Number of complete checkpoints to keep; all by default.
        asynchronous: Whether training continues while files are written.
        max_file_bytes: Approximate maximum size of a file; for S3, each file is held in memory.
        group: Process group for its messages; a separate one by default.
    """

    def __init__(
        self,
        location: str | os.PathLike[str] | CheckpointStorage,
        *,
        keep: int | None = None,
        asynchronous: bool = True,
        max_file_bytes: int = DEFAULT_FILE_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep at least one checkpoint, not {keep}")
        self.location = (
            open_checkpoints(location) if isinstance(location, (str, os.PathLike)) else location
        )
        self._keep = keep
        self._max_file_bytes = max_file_bytes
        self._buffers = HostBuffers() if asynchronous else None
        self._saving: _Saving | None = None
        self.group = new_group() if group is None else group
        """CPU process group for messages about checkpoints."""
        self.stall_s = 0.0
        """Total time that training has waited for checkpoints."""
        self.published_step = -1
        """The newest step that is known to be published."""
        if self._is_first:
            self.location.sweep()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.close()

    @property
    def failed(self) -> bool:
        """Whether the save in progress has failed, as far as this rank knows."""
        return self._saving is not None and self._saving.error is not None

    def save(self, step: int, state: dict[str, Any], identity: Json, of_rank: Json = None) -> None:
        """Saves the state, which may change once this returns; all ranks must call it.

        Raises the error of the previous save, if it failed.

        Args:
            step: Number of steps that the state was trained for.
            state: Nested dictionaries of tensors, including torch's distributed ones, and of JSON
                values.
            identity: Metadata of the run; the first rank's is kept.
            of_rank: Metadata of this rank, such as its random state.
        """
        started = time.perf_counter()
        try:
            self.wait()
            pending = PendingSave(
                location=self.location,
                step=step,
                identity=encode_json(identity, "the run's identity"),
                of_rank=encode_json(of_rank, "a rank's identity"),
                max_file_bytes=self._max_file_bytes,
            )
            self._saving = _Saving(self, pending, state, self._buffers)
            if self._buffers is None:
                self._saving.run()
                self.wait()
            else:
                self._saving.start()
                self._saving.staged.wait()
        finally:
            self.stall_s += time.perf_counter() - started

    def wait(self) -> None:
        """Waits until the last save is published, and raises on all ranks if it failed."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        if saving.thread is not None:
            saving.thread.join()
        if saving.error is not None:
            raise saving.error

    def close(self) -> None:
        """Waits for a save in progress without raising its error, and destroys the group."""
        if self._saving is not None and self._saving.thread is not None:
            self._saving.thread.join()
        self._saving = None
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def complete(self, step: int, save_id: str) -> None:
        """Completes a save on all ranks once it is written; does nothing here."""

    def retain(self) -> None:
        """Removes checkpoints that are no longer kept; only the first rank does."""
        if not self._is_first:
            return
        if self._keep is not None:
            keep_last(self.location, self._keep)
        self.location.sweep()

    @property
    def _is_first(self) -> bool:
        return self.group is None or dist.get_rank(self.group) == 0


def new_group() -> dist.ProcessGroup | None:
    """Creates a CPU process group of all ranks, so that messages do not mix with training's."""
    return dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if dist.is_initialized() else None


class _Saving:
    """One save, on the calling thread or a separate one."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        pending: PendingSave,
        state: dict[str, Any],
        buffers: HostBuffers | None,
    ) -> None:
        self._checkpointer = checkpointer
        self._pending = pending
        self._state: dict[str, Any] | None = state
        self.staged = threading.Event()
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self._writer = CheckpointWriter(pending, buffers, self.staged.set)

    def start(self) -> None:
        """Starts the save on a thread."""
        self.thread = threading.Thread(
            target=self.run, name=f"checkpoint-{self._pending.step}", daemon=True
        )
        self.thread.start()

    def run(self) -> None:
        """Saves, publishes and cleans up; keeps an error for the caller."""
        url = f"{self._pending.location.url}, step {self._pending.step}"
        failed = True
        try:
            with named_failures(f"saving {url}"):
                save_state(
                    self._state,
                    storage_writer=self._writer,
                    planner=JsonSavePlanner(),
                    process_group=self._checkpointer.group,
                )
            self._checkpointer.complete(self._pending.step, self._writer.save_id)
            self._checkpointer.published_step = self._pending.step
            failed = False
        except BaseException as error:  # `wait` raises it.
            self.error = error
        finally:
            self._state = None
            self._writer.close(failed=failed)
            self.staged.set()
        if not failed:
            try:
                self._checkpointer.retain()
            except CheckpointError as error:
                self.error = error
