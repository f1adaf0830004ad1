"""Where datasets live: a local directory, or a prefix of an S3 bucket, behind one protocol.

Invariant of every storage: a name holds a whole object or none. A writer that is killed leaves
nothing that a reader would take for data.
"""

import os
from typing import Protocol

from paceline.core.errors import UsageError
from paceline.data.storage.local import LocalStorage

_S3 = "s3://"


class Storage(Protocol):
    """Objects by name; a name has parts between slashes."""

    @property
    def url(self) -> str:
        """The place itself, as a user would write it."""

    def read(self, name: str) -> bytes:
        """Returns a whole object; FileNotFoundError if there is none."""

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes from `start` to before `end`, all of which must be there."""

    def write(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Puts an object in place, whole or not at all; replaces what was there."""

    def create(self, name: str, content: bytes | bytearray | memoryview) -> bool:
        """Puts an object in place unless there is one; returns whether it is there now as given."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Returns how many bytes every object below a prefix has, by name."""

    def delete(self, name: str) -> None:
        """Removes an object; nothing happens if there is none."""

    def clear(self, prefix: str) -> None:
        """Removes everything below a prefix."""

    def discard_unfinished(self) -> None:
        """Removes what killed writers left half-written; nobody may be writing."""


def open_storage(place: str | os.PathLike[str]) -> Storage:
    """Returns the storage at a directory or at ``s3://bucket/prefix``."""
    text = os.fspath(place)
    if text.startswith(_S3):
        from paceline.data.storage.s3 import S3Storage

        return S3Storage(text)
    if "://" in text:
        raise UsageError(f"{text}: not a place for data; name a directory or s3://bucket/prefix")
    return LocalStorage(text)
