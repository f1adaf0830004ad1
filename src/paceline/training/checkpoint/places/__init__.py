"""Where checkpoints live: a local directory or a prefix of an S3 bucket, behind one protocol.

Invariant of every place: a step is complete or is not there. Who saves writes files under the name
of the attempt, and publishes them in one atomic act; a step that is there is never written again.
"""

import os
from collections.abc import Iterable
from typing import Protocol

from paceline.data.storage import Storage, open_storage
from paceline.data.storage.s3 import S3Storage


class Place(Protocol):
    """Checkpoints by step, and attempts to save one."""

    @property
    def url(self) -> str:
        """The place itself, as a user would write it."""

    @property
    def is_shared(self) -> bool:
        """Whether every rank sees what any of them has written."""

    def steps(self) -> list[int]:
        """Returns the steps that were published, the newest first."""

    def storage(self, step: int) -> Storage:
        """Returns the files of a published step."""

    def begin(self, step: int, save_id: str) -> None:
        """Makes room for an attempt; one process calls it, before any writes."""

    def write(self, step: int, save_id: str, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Writes a file of an attempt, and returns its name in the published step."""

    def sizes(self, step: int, save_id: str) -> dict[str, int]:
        """Returns the files of an attempt that this process sees, by their names in the step."""

    def publish(self, step: int, save_id: str, manifest: bytes) -> None:
        """Makes an attempt the step; one process calls it, after all have written."""

    def abandon(self, step: int, save_id: str) -> None:
        """Removes an attempt that failed."""

    def release(self, step: int, save_id: str) -> None:
        """Lets go of an attempt that another process publishes or abandons."""

    def remove(self, step: int) -> None:
        """Removes a published step; one that is half removed is not there."""

    def set_aside(self, step: int, save_id: str) -> None:
        """Takes a damaged step out of the way, for somebody to look at."""

    def sweep(self) -> list[str]:
        """Removes what killed savers have left behind, and returns the names."""


def open_place(place: str | os.PathLike[str]) -> Place:
    """Returns the place at a directory or at ``s3://bucket/prefix``."""
    from paceline.training.checkpoint.places.bucket import BucketPlace
    from paceline.training.checkpoint.places.directory import DirectoryPlace

    storage = open_storage(place)
    return BucketPlace(storage) if isinstance(storage, S3Storage) else DirectoryPlace(storage.url)
