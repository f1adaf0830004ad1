"""Reading a Chrome trace of any size, event by event.

A trace is one JSON object whose ``traceEvents`` hold millions of small objects, or that list
alone. It is read in pieces: each is cut where one event ends and the next begins, and decoded at
once. Where to cut is a guess, for the same characters may stand inside of a name; that a piece
decodes as a list of events proves the guess right, and if it does not, its events are decoded one
by one. Nothing is kept, so memory does not grow with the file.

A file that was cut off, as by a job that was killed, gives the events before the cut. Anything else
that is not a trace is an error with the place.
"""

import gzip
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Generic, TypeVar, cast

import msgspec

from paceline.core.errors import PacelineError

MAX_EVENT_BYTES = 16 * 2**20
"""What is longer than this is no event."""

_PIECE_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"
_BARE_LIST = re.compile(rb"\s*\[")
_LIST_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_LONGEST_LIST_START = 256
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_TAIL_BYTES = 2**16
_SPACES = re.compile(rb"[\s,]*")
_END_OF_FIRST = re.compile(r"trailing characters \(byte (\d+)\)")
_MALFORMED_AT = re.compile(r"\(byte (\d+)\)")
_TRUNCATED = "Input data was truncated"


class TraceError(PacelineError):
    """A trace that cannot be read, naming file and place."""


class EventArguments(msgspec.Struct, gc=False):
    """What is read of an event's arguments."""

    name: msgspec.Raw = msgspec.Raw(b"")
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))


class Event(msgspec.Struct, gc=False):
    """What is read of an event."""

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
    """The events of one file, in the order in which they stand there.

    Args:
        path: A trace, plain or compressed with gzip.
        kind: What events are decoded into: `Event`, or `AnyEvent` with all that they hold.
    """

    def __init__(self, path: pathlib.Path, kind: type[_Kind]) -> None:
        self.path = path
        self.num_bytes = 0
        """Read so far, after decompression."""
        self.is_truncated = False
        """Whether the file ended before the list of events did; known at the end."""
        self.footer = b""
        """The beginning of what follows the list of events; known at the end."""
        self._decode_one: Callable[[memoryview], _Kind] = msgspec.json.Decoder(kind).decode
        self._decode_list: Callable[[bytes], list[_Kind]] = msgspec.json.Decoder(
            list[kind]  # type: ignore[valid-type]
        ).decode

    def __iter__(self) -> Iterator[list[_Kind]]:
        """Yields events in lists of some thousands."""
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

    def _read(self, file: BinaryIO) -> bytes:
        piece = file.read(_PIECE_BYTES)
        self.num_bytes += len(piece)
        return piece

    def _lists(self, file: BinaryIO) -> Iterator[list[_Kind]]:
        rest = self._skip_to_events(file)
        while True:
            piece = self._read(file)
            events, rest, is_over = self._take(rest + piece)
            if events:
                yield events
            if is_over:
                return
            if not (piece or events):
                self.is_truncated = True
                return
            if len(rest) > MAX_EVENT_BYTES:
                raise self._error(rest, 0, f"an event of more than {MAX_EVENT_BYTES} bytes")

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
        """Returns the events at the beginning, what is left, and whether the list has ended."""
        boundaries = list(_BOUNDARY.finditer(data, max(0, len(data) - _TAIL_BYTES)))
        if boundaries:
            cut = boundaries[-1]
            try:
                events = self._decode_list(b"[%b]" % data[: cut.start() + 1])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # The guess was wrong, or an event is: one by one it shows.
            else:
                return events, data[cut.end() :], False
        return self._take_one_by_one(data)

    def _take_one_by_one(self, data: bytes) -> tuple[list[_Kind], bytes, bool]:
        events: list[_Kind] = []
        view = memoryview(data)
        position = 0
        while True:
            spaces = _SPACES.match(data, position)
            assert spaces is not None
            position = spaces.end()
            if position == len(data):
                return events, b"", False
            if data[position : position + 1] == b"]":
                self.footer = data[position + 1 :]
                return events, b"", True
            end = self._end_of_event(data, view, position)
            if end is None:
                return events, data[position:], False
            try:
                events.append(self._decode_one(view[position:end]))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._error(data, position, f"not an event: {error}") from error
            position = end

    def _end_of_event(self, data: bytes, view: memoryview, position: int) -> int | None:
        """Returns where the event ends that begins here; None if that is not in the data."""
        if data[position : position + 1] != b"{":
            raise self._error(data, position, "an event is expected here")
        try:
            _decode_raw(view[position:])
        except RecursionError as error:
            raise self._error(data, position, "an event that is nested too deeply") from error
        except msgspec.DecodeError as error:
            message = str(error)
            if message == _TRUNCATED:
                return None
            if match := _END_OF_FIRST.search(message):
                return position + int(match[1]) - 1  # It has read that character already.
            place = _MALFORMED_AT.search(message)
            wrong = position + (int(place[1]) if place else 0)
            if wrong >= len(data) - 1:
                return None  # Such as a number that ends with its point.
            raise self._error(data, wrong, _MALFORMED_AT.sub("", message).strip()) from error
        return len(data)

    def _error(self, data: bytes, position: int, problem: str) -> TraceError:
        byte = self.num_bytes - len(data) + position
        return TraceError(f"{self.path}: byte {byte}: {problem}")


# Only finds the end of an object: what is inside is checked for its form and skipped.
_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode
