r"""Documents from text files and JSON Lines.

Splits a stream of bytes at a separator, in bounded memory for parts of any size.

A part belongs to the range in which it starts, so ranges that cover a file cover each of its parts
exactly once. This requires a separator that cannot overlap itself; a file with any other separator
(such as a blank line, ``\n\n``) is read as a single range.
"""

import codecs
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from paceline.data.sources.documents import (
    EMPTY,
    INVALID_JSON,
    INVALID_UTF8,
    TOO_LONG,
    Document,
    Found,
    LeftOut,
    missing_field,
    text_document,
)
from paceline.data.sources.files import FoundFile, read_chunks
from paceline.records.codecs import UNDECODABLE


class Part(NamedTuple):
    """The bytes between two separators."""

    place: int
    """Offset of its first byte in the file."""
    content: bytes | None
    """None if the part is larger than the limit."""
    num_bytes: int
    is_last: bool
    """Whether the part ends at the end of the file instead of at a separator."""


def overlaps_itself(separator: bytes) -> bool:
    """Returns whether a proper prefix of a separator is also its suffix."""
    return any(separator.startswith(separator[i:]) for i in range(1, len(separator)))


def cut(
    chunks: Iterable[bytes], separator: bytes, *, start: int, end: int | None, most_bytes: int
) -> Iterator[Part]:
    """Yields the parts that start in [`start`, `end`).

    Args:
        chunks: The bytes of the file from `first_byte(start, separator)` on.
        separator: The separator of parts; empty for none.
        start: First byte of the range.
        end: First byte after the range; None for the end of the file.
        most_bytes: Size above which the content of a part is discarded and only its size counted.
    """
    position = first_byte(start, separator)
    part = _Unfinished(position, most_bytes, is_wanted=start == 0)
    tail = b""  # May be the start of a separator.
    for chunk in chunks:
        pieces = (tail + chunk).split(separator) if separator else [tail + chunk]
        for piece in pieces[:-1]:
            part.add(piece)
            if part.is_wanted:
                yield part.finished(is_last=False)
            next_place = part.place + part.num_bytes + len(separator)
            if end is not None and next_place >= end:
                return
            part = _Unfinished(next_place, most_bytes, is_wanted=True)
        body = max(0, len(pieces[-1]) - max(0, len(separator) - 1))
        part.add(pieces[-1][:body])
        tail = pieces[-1][body:]
        position += len(chunk)
        if not part.is_wanted and end is not None and position >= end + len(separator):
            return  # The part that started before this range extends beyond it.
    part.add(tail)
    if part.is_wanted:
        yield part.finished(is_last=True)


def first_byte(start: int, separator: bytes) -> int:
    """Returns the offset at which to start reading, to see a separator just before a range."""
    return max(0, start - len(separator))


class _Unfinished:
    """A part whose end has not been read yet."""

    def __init__(self, place: int, most_bytes: int, *, is_wanted: bool) -> None:
        self.place = place
        self.is_wanted = is_wanted
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._held: list[bytes] = []

    def add(self, content: bytes) -> None:
        self.num_bytes += len(content)
        if not self.is_wanted or self.num_bytes > self._most_bytes:
            self._held.clear()
        elif content:
            self._held.append(content)

    def finished(self, *, is_last: bool) -> Part:
        is_held = self.num_bytes <= self._most_bytes
        content = b"".join(self._held) if is_held else None
        return Part(self.place, content, self.num_bytes, is_last)


LINE_END = b"\n"


def text_documents(
    file: FoundFile, start: int, end: int | None, separator: bytes, most_bytes: int
) -> Iterator[Found]:
    """Yields the documents between separators that start in a range of bytes."""
    for part in _parts(file, start, end, separator, most_bytes):
        # The text after the last separator is a document only if it is not blank.
        if (
            part.is_last
            and part.place > 0
            and part.content is not None
            and not part.content.strip()
        ):
            continue
        if part.content is None:
            yield LeftOut(part.place, TOO_LONG, part.num_bytes)
        else:
            yield text_document(part.place, part.content)


def json_documents(
    file: FoundFile, start: int, end: int | None, field: str, most_bytes: int
) -> Iterator[Found]:
    """Yields a field of each line that starts in a range of bytes; skips blank lines."""
    decode = _row_decoder(field).decode
    for place, line, num_bytes, _ in _parts(file, start, end, LINE_END, most_bytes):
        if line is None:
            yield LeftOut(place, TOO_LONG, num_bytes)
            continue
        try:
            text: str = decode(line).text
        except UNDECODABLE as error:
            if line.strip():
                yield LeftOut(place, _reason(line, field, error), num_bytes)
            continue
        if text and not text.isspace():
            yield Document(place, text)
        else:
            yield LeftOut(place, EMPTY, num_bytes)


def _parts(
    file: FoundFile, start: int, end: int | None, separator: bytes, most_bytes: int
) -> Iterator[Part]:
    chunks = read_chunks(file, first_byte(start, separator))
    for part in cut(chunks, separator, start=start, end=end, most_bytes=most_bytes):
        if part.place == 0 and part.content is not None:
            # A byte order mark is not part of the text.
            part = part._replace(content=part.content.removeprefix(codecs.BOM_UTF8))
        yield part


def _reason(line: bytes, field: str, error: Exception) -> str:
    try:
        line.decode()
    except UnicodeDecodeError:
        return INVALID_UTF8
    # A validation error means valid JSON, but not an object with a string field of that name.
    return missing_field(field) if isinstance(error, msgspec.ValidationError) else INVALID_JSON


@functools.lru_cache(maxsize=1)
def _row_decoder(field: str) -> msgspec.json.Decoder:  # type: ignore[type-arg]
    """Returns a decoder of one field of an object; it skips other fields without decoding."""
    row = msgspec.defstruct("Row", [("text", str)], rename={"text": field}, gc=False)
    return msgspec.json.Decoder(row)
