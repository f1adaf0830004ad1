"""Reads a Chrome trace of any size, event by event.

A trace is one JSON object whose ``traceEvents`` list holds millions of small objects, or that list
alone. It is read in pieces, each cut at a boundary between two events and decoded in one call. The
cut is a guess, because the same characters may occur inside a string. If the piece decodes as a
list of events, the guess was right; otherwise its events are decoded one by one. No events are
retained, so memory does not grow with the file.

A truncated file, such as one from a killed job, yields the events before the cut. Any other
malformed input raises an error that gives the byte offset.
"""

import gzip
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Generic, TypeVar, cast

import msgspec

from paceline.core.errors import PacelineError

MAX_EVENT_BYTES = 16 * 2**20
"""Longer input is not an event."""

_PIECE_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"
_BARE_LIST = re.compile(rb"\s*\[")
_LIST_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_LONGEST_LIST_START = 256
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_TAIL_BYTES = 2**16
_SPACES = re.compile(r"[\s,]*")
# Matches a truncated string, number or word at the end of the text.
_CUT_OFF = re.compile(r'"(?:[^"\\]++|\\.)*+\\?|[\\\w.+-]*', re.DOTALL)
# Only finds the end of an event: checks the syntax of its contents but keeps almost nothing.
_JSON = json.JSONDecoder(strict=False, parse_int=str, object_pairs_hook=len)


class TraceError(PacelineError):
    """A trace cannot be read; the message gives the file and the byte offset."""


class EventArguments(msgspec.Struct, gc=False):
    """The decoded subset of an event's arguments."""

    name: msgspec.Raw = msgspec.Raw(b"")
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    operator: int | float | str | bool | None = msgspec.field(name="External id", default=0)


class Event(msgspec.Struct, gc=False):
    """The decoded subset of an event."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    """Microseconds."""
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: EventArguments | None = None


AnyEvent = dict[str, Any]
_Kind = TypeVar("_Kind", Event, AnyEvent)


class TraceReader(Generic[_Kind]):
    """Iterates over the events of one file, in file order.

    The trace at `path` may be compressed with gzip. `kind` is the type of decoded events: `Event`,
    or `AnyEvent` with all fields.
    """

    def __init__(self, path: pathlib.Path, kind: type[_Kind]) -> None:
        self.path = path
        self.num_bytes = 0
        """Bytes read so far, after decompression."""
        self.is_truncated = False
        """Whether the file ended before the list of events did; valid after iteration."""
        self._decode_one: Callable[[bytes], _Kind] = msgspec.json.Decoder(kind).decode
        self._decode_list: Callable[[bytes], list[_Kind]] = msgspec.json.Decoder(
            list[kind]  # type: ignore[valid-type]
        ).decode

    def __iter__(self) -> Iterator[list[_Kind]]:
        """Yields events in lists of a few thousand."""
        try:
            with self._open() as file:
                yield from self._lists(file)
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror or error}") from error
        except (EOFError, zlib.error) as error:
            raise TraceError(f"{self.path}: {error}") from error

    def _open(self) -> BinaryIO:
        with self.path.open("rb") as file:
            is_compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        if is_compressed:
            return cast("BinaryIO", gzip.open(self.path, "rb"))
        return self.path.open("rb")

    def _read(self, file: BinaryIO, num_bytes: int = 0) -> bytes:
        piece = file.read(max(num_bytes, _PIECE_BYTES))
        self.num_bytes += len(piece)
        return piece

    def _lists(self, file: BinaryIO) -> Iterator[list[_Kind]]:
        rest = self._skip_to_events(file)
        while True:
            # Double the buffer: a long event is not rescanned for every piece.
            piece = self._read(file, len(rest))
            events, rest, is_over = self._take(rest + piece)
            if events:
                yield events
            if is_over:
                return
            if not (piece or events):
                self.is_truncated = True
                return
            if len(rest) > MAX_EVENT_BYTES:
                raise self._error(rest, f"an event of more than {MAX_EVENT_BYTES} bytes")

    def _skip_to_events(self, file: BinaryIO) -> bytes:
        head = self._read(file)
        match = _BARE_LIST.match(head) or _LIST_START.search(head)
        while match is None and (piece := self._read(file)):
            head = head[-_LONGEST_LIST_START:] + piece
            match = _LIST_START.search(head)
        if match is not None:
            return head[match.end() :]
        raise TraceError(f"{self.path}: no list of traceEvents; is this a Chrome trace?")

    def _take(self, data: bytes) -> tuple[list[_Kind], bytes, bool]:
        """Returns the leading events, the remaining data, and whether the list has ended."""
        boundaries = list(_BOUNDARY.finditer(data, max(0, len(data) - _TAIL_BYTES)))
        if boundaries:
            cut = boundaries[-1]
            try:
                events = self._decode_list(b"[%b]" % data[: cut.start() + 1])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # The guess was wrong or an event is invalid: decode one by one to find out.
            else:
                return events, data[cut.end() :], False
        return self._take_one_by_one(data)

    def _take_one_by_one(self, data: bytes) -> tuple[list[_Kind], bytes, bool]:
        events: list[_Kind] = []
        # surrogateescape round-trips bytes that are not UTF-8.
        text = data.decode(errors="surrogateescape")
        position = 0
        while True:
            spaces = _SPACES.match(text, position)
            assert spaces is not None
            position = spaces.end()
            if position == len(text):
                return events, b"", False
            if text[position] == "]":
                return events, b"", True
            end = self._end_of_event(text, position)
            if end is None:
                return events, _as_bytes(text[position:]), False
            try:
                events.append(self._decode_one(_as_bytes(text[position:end])))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._error(_as_bytes(text[position:]), f"not an event: {error}") from error
            position = end

    def _end_of_event(self, text: str, position: int) -> int | None:
        """Returns the end of the event at `position`; None if the text ends before it does."""
        if text[position] != "{":
            raise self._error(_as_bytes(text[position:]), "an event is expected here")
        try:
            return _JSON.raw_decode(text, position)[1]
        except RecursionError as error:
            deep = "an event that is nested too deeply"
            raise self._error(_as_bytes(text[position:]), deep) from error
        except json.JSONDecodeError as error:
            # Check for an unclosed last quote first: the regex scans every character after it.
            if text.rfind('"') == error.pos or _CUT_OFF.fullmatch(text, error.pos):
                return None
            raise self._error(_as_bytes(text[error.pos :]), error.msg) from error

    def _error(self, rest: bytes, problem: str) -> TraceError:
        """Returns an error at the offset of the first remaining byte."""
        return TraceError(f"{self.path}: byte {self.num_bytes - len(rest)}: {problem}")


def _as_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
