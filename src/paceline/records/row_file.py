"""Rows of a run, one JSON object per line, in a file with a single writer.

Appending is one write, so that readers see whole lines. Half a line at the end, of a writer that
was killed, does not count. A run that goes on from an earlier step forgets the rows after it.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from paceline.core.errors import RecordError
from paceline.records.codecs import UNDECODABLE


class Row(Protocol):
    """What a step of a run has left behind."""

    @property
    def step(self) -> int:
        """The step it belongs to."""


RowT = TypeVar("RowT", bound=Row)


class RowFile(Generic[RowT]):
    """Rows in the order of their steps.

    Args:
        path: The file, which is made with its first row.
        row_type: What msgspec decodes a line as: a struct, or a union of them.
        what: What errors call a row.
    """

    def __init__(self, path: str | os.PathLike[str], row_type: Any, what: str) -> None:
        self.path = pathlib.Path(path)
        self._decoder = msgspec.json.Decoder(row_type)
        self._what = what

    def append(self, row: RowT) -> None:
        """Appends a row in one write."""
        try:
            file = self.path.open("ab", buffering=0)
        except FileNotFoundError:  # Only a first row finds no directory.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("ab", buffering=0)
        with file:
            file.write(msgspec.json.encode(row) + b"\n")

    def read(self) -> Iterator[RowT]:
        """Yields the rows; a damaged line is an error that names file and line."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield self._decoder.decode(line)
                except UNDECODABLE as error:
                    raise RecordError(f"{self.path}:{number}: not {self._what}: {error}") from error

    def keep_up_to(self, step: int) -> None:
        """Forgets the rows of later steps.

        The file is replaced as a whole: a crash meanwhile leaves the old one.
        """
        if not self.path.exists():
            return
        kept = b"".join(msgspec.json.encode(row) + b"\n" for row in self.read() if row.step <= step)
        beside = self.path.with_suffix(".unfinished")
        beside.write_bytes(kept)
        beside.replace(self.path)
