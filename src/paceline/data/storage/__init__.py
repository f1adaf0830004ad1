"""Storage for datasets: a local directory or a prefix of an S3 bucket, behind one protocol.

Invariant of every storage: a name refers to a complete object or to none. A killed writer leaves
nothing that a reader would mistake for data.
"""

import os
from typing import Protocol

from paceline.core.errors import UsageError
from paceline.data.storage.local import LocalStorage

_S3 = "s3://"


class Storage(Protocol):
    """Objects by name; the parts of a name are separated by slashes."""

    @property
    def url(self) -> str:
        """The location of the storage, as a user would write it."""

    def read(self, name: str) -> bytes:
        """Returns a whole object; raises FileNotFoundError if there is none."""

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes in [`start`, `end`); raises if the object is shorter."""

    def write(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Writes or replaces an object atomically."""

    def create(self, name: str, content: bytes | bytearray | memoryview) -> bool:
        """Writes an object unless one exists; returns whether it now has the given content."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Returns the size in bytes of every object below a prefix, by name."""

    def delete(self, name: str) -> None:
        """Deletes an object; does nothing if there is none."""

    def clear(self, prefix: str) -> None:
        """Deletes all objects below a prefix."""

    def discard_unfinished(self) -> None:
        """Deletes partial files of killed writers; no process may be writing."""


def open_storage(place: str | os.PathLike[str]) -> Storage:
    """Returns the storage at a directory or at ``s3://bucket/prefix``."""
    text = os.fspath(place)
    if text.startswith(_S3):
        from paceline.data.storage.s3 import S3Storage

        return S3Storage(text)
    if "://" in text:
        raise UsageError(f"{text}: not a place for data; name a directory or s3://bucket/prefix")
    return LocalStorage(text)
