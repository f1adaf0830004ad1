r"""Splits a stream of bytes at a separator, in bounded memory for parts of any size.

A part belongs to the range in which it starts, so ranges that cover a file cover each of its parts
exactly once. This requires a separator that cannot overlap itself; a file with any other separator
(such as a blank line, ``\n\n``) is read as a single range.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


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
