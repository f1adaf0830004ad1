"""Checkpoint locations: a local directory or a prefix of an S3 bucket, behind one protocol.

Invariant of every location: a step is either complete or absent. Ranks write files under the name
of the attempt, and one publishes them in one atomic operation. A published step is never written
again.
"""

import os
from collections.abc import Iterable
from typing import Protocol

from paceline.data.storage import Storage, open_storage
from paceline.data.storage.s3 import S3Storage


class Place(Protocol):
    """A location for checkpoints by step, and for attempts to save them."""

    @property
    def url(self) -> str:
        """Path or URL of the location, as a user would write it."""

    @property
    def is_shared(self) -> bool:
        """Whether every rank sees the files of all ranks."""

    def steps(self) -> list[int]:
        """Returns the published steps, newest first."""

    def storage(self, step: int) -> Storage:
        """Returns the files of a published step."""

    def begin(self, step: int, save_id: str) -> None:
        """Prepares an attempt; one process calls it, before any process writes."""

    def write(self, step: int, save_id: str, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Writes a file of an attempt, and returns its name in the published step."""

    def sizes(self, step: int, save_id: str) -> dict[str, int]:
        """Returns the sizes of the attempt's files that this process sees, by name in the step."""

    def publish(self, step: int, save_id: str, manifest: bytes) -> None:
        """Publishes an attempt as the step; one process calls it, after all have written."""

    def abandon(self, step: int, save_id: str) -> None:
        """Removes a failed attempt."""

    def release(self, step: int, save_id: str) -> None:
        """Releases an attempt that another process publishes or abandons."""

    def remove(self, step: int) -> None:
        """Removes a published step; a partially removed step counts as absent."""

    def set_aside(self, step: int, save_id: str) -> None:
        """Renames a damaged step, and keeps it for inspection."""

    def sweep(self) -> list[str]:
        """Removes what killed processes have left behind; returns the names."""


def open_place(place: str | os.PathLike[str]) -> Place:
    """Opens the location at a directory or at ``s3://bucket/prefix``."""
    from paceline.training.checkpoint.places.bucket import BucketPlace
    from paceline.training.checkpoint.places.directory import DirectoryPlace

    storage = open_storage(place)
    return BucketPlace(storage) if isinstance(storage, S3Storage) else DirectoryPlace(storage.url)
