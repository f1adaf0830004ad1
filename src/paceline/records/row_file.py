"""Rows of a run, one JSON object per line, in a file with a single writer.

Each append is one write, so that readers see whole lines. A partial line at the end, left by a
killed writer, is ignored. A run that resumes from an earlier step deletes the rows after it.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from paceline.core.errors import RecordError
from paceline.records.codecs import UNDECODABLE


class Row(Protocol):
    """A row that belongs to a step of a run."""

    @property
    def step(self) -> int:
        """The step that the row belongs to."""


RowT = TypeVar("RowT", bound=Row)


class RowFile(Generic[RowT]):
    """Rows in the order of their steps.

    Args:
        path: The file, which is created with its first row.
        row_type: The type that msgspec decodes a line to: a struct, or a union of structs.
        what: Description of a row in error messages.
    """

    def __init__(self, path: str | os.PathLike[str], row_type: Any, what: str) -> None:
        self.path = pathlib.Path(path)
        self._decoder = msgspec.json.Decoder(row_type)
        self._what = what

    def append(self, row: RowT) -> None:
        """Appends a row in one write."""
        try:
            file = self.path.open("ab", buffering=0)
        except FileNotFoundError:  # The directory is missing only before the first row.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("ab", buffering=0)
        with file:
            file.write(msgspec.json.encode(row) + b"\n")

    def read(self) -> Iterator[RowT]:
        """Yields the rows; the error for a damaged line names file and line."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield self._decoder.decode(line)
                except UNDECODABLE as error:
                    raise RecordError(f"{self.path}:{number}: not {self._what}: {error}") from error

    def keep_up_to(self, step: int) -> None:
        """Deletes the rows of later steps.

        The file is replaced atomically: a crash leaves the old one.
        """
        if not self.path.exists():
            return
        kept = b"".join(msgspec.json.encode(row) + b"\n" for row in self.read() if row.step <= step)
        beside = self.path.with_suffix(".unfinished")
        beside.write_bytes(kept)
        beside.replace(self.path)
