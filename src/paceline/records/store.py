"""Append-only files of one JSON object per line: records of any writer, and rows of one run.

A `RecordStore` is safe for several writers: each holds an exclusive lock while it appends one whole
line in one write, a partial write is rolled back, and a torn line of a killed writer never merges
with the next one. On a file system without locks, the one write keeps lines apart. Readers read
only the bytes that existed while they held a shared lock. Reading is strict: the error for an
unknown key or a damaged line names file, line and field.

A `RowFile` has a single writer. Each append is one write, so that readers see whole lines. A
partial line at the end, left by a killed writer, is ignored. A run that resumes from an earlier
step deletes the rows after it.

A plan is a JSON file by itself, which is decoded as strictly.
"""

import contextlib
import errno
import fcntl
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Annotated, Any, Generic, Protocol, TypeVar

import msgspec

from paceline.core.errors import RecordError, ShapeError
from paceline.core.files import atomic_file
from paceline.core.lock import lock_file
from paceline.core.plan import Plan
from paceline.core.strategies import with_current_names
from paceline.core.units import one_line
from paceline.records.kinds import MEASURED_RATES
from paceline.records.schema import CaseValue, Record

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A number in a file that may come from elsewhere, such as a time."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**59)]
"""A count, size or index in a file that may come from elsewhere; its bytes fit 64 bits too."""
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**59)]
"""A count or size in such a file that cannot be zero."""

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions from decoding untrusted JSON; deep nesting raises the last."""


_DECODER = msgspec.json.Decoder(Record)


def decode_record(line: bytes) -> Record:
    """Decodes one line; raises a `RecordError` that names the invalid field."""
    try:
        return _DECODER.decode(with_current_names(line))
    except UNDECODABLE as error:
        raise RecordError(f"not a valid record: {one_line(error)}") from error


class RecordStore:
    """Records in a JSON Lines file at `path`, which the first append creates."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)

    def append(self, record: Record) -> None:
        """Appends one `record` durably, or leaves the file unchanged."""
        self.append_missing(lambda _stored: (record,))

    def append_missing(self, make: Callable[[Iterable[Record]], Iterable[Record]]) -> None:
        """Appends the records that `make` returns, given those stored; no writer comes between."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            with os.fdopen(descriptor, "rb") as file:
                is_locked = lock_file(descriptor, fcntl.LOCK_EX)
                for record in make(self._records(file)):
                    _append_whole(descriptor, msgspec.json.encode(record) + b"\n", is_locked)
        except OSError as error:
            raise RecordError(
                f"{self.path}: cannot append a record: {error.strerror}; free disk space or name "
                "another file with --store"
            ) from error

    def read(self) -> Iterator[Record]:
        """Yields the records in the order in which they were appended."""
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise RecordError(
                f"{self.path}: cannot read the record store: {error.strerror}; `paceline bench` "
                "creates one"
            ) from error
        with file:
            lock_file(file.fileno(), fcntl.LOCK_SH)
            size = os.fstat(file.fileno()).st_size
            lock_file(file.fileno(), fcntl.LOCK_UN)
            yield from self._records(file, size)

    def _records(self, file: IO[bytes], size: float = math.inf) -> Iterator[Record]:
        """Yields the records of the first `size` bytes."""
        for number, line in enumerate(file, start=1):
            size -= len(line)
            if size < 0:
                return
            if not line.strip():
                continue
            try:
                yield decode_record(line)
            except RecordError as error:
                raise RecordError(
                    f"{self.path}:{number}: {error}; fix or delete that line"
                ) from error


def latest_per_case(records: Iterable[Record]) -> list[Record]:
    """Returns the last of the `records` of each case, in the order of first appearance."""
    return list({case_key(record): record for record in records}.values())


def case_key(record: Record) -> tuple[str, frozenset[tuple[str, CaseValue]]]:
    """Returns a key that identifies the case of a record.

    Measured rates of links are part of a case but differ on every run, so they are ignored.
    """
    case = frozenset(item for item in record.case.items() if item[0] not in MEASURED_RATES)
    return record.kind, case


def _append_whole(descriptor: int, line: bytes, is_locked: bool) -> None:
    """Appends a line in one write; rolls a partial write back, unless others may have appended."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        line = b"\n" + line
    try:
        rest = memoryview(line)[os.write(descriptor, line) :]
        # With a lock, the next write says why the first was cut short.
        while rest and is_locked:
            rest = rest[os.write(descriptor, rest) :]
        if rest:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            if is_locked:
                os.ftruncate(descriptor, size)
        raise


class Row(Protocol):
    """A row that belongs to a step of a run."""

    @property
    def step(self) -> int:
        """The step that the row belongs to."""


RowT = TypeVar("RowT", bound=Row)


class RowFile(Generic[RowT]):
    """Rows in the order of their steps, in a file that the first row creates.

    msgspec decodes a line to `row_type`, a struct or a union of structs. Errors call a row `what`.
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
                    raise RecordError(
                        f"{self.path}:{number}: not {self._what}: {one_line(error)}"
                    ) from error

    def keep_up_to(self, step: int) -> None:
        """Deletes the rows of later steps.

        The file is replaced atomically: a crash leaves the old one.
        """
        if not self.path.exists():
            return
        kept = b"".join(msgspec.json.encode(row) + b"\n" for row in self.read() if row.step <= step)
        with atomic_file(self.path) as file:
            file.write(kept)


def encode_plan(plan: Plan) -> bytes:
    """Encodes a `plan` as one JSON object."""
    return msgspec.json.encode(plan)


def decode_plan(data: bytes, source: str = "plan") -> Plan:
    """Decodes a plan from `data`; errors name `source` and the invalid field."""
    try:
        raw = msgspec.json.decode(data)
        plan = msgspec.convert(raw, Plan)
    except (*UNDECODABLE, ShapeError) as error:
        raise RecordError(f"{source}: not a valid plan: {one_line(error)}") from error
    unknown = _first_unknown_key(raw, msgspec.to_builtins(plan), "$")
    if unknown is not None:
        raise RecordError(f"{source}: not a valid plan: unknown field `{one_line(unknown)}`")
    return plan


def _first_unknown_key(raw: dict[str, Any], known: dict[str, Any], path: str) -> str | None:
    # msgspec forbids unknown keys only for its own structs; the specs are plain dataclasses so
    # that core has no dependencies.
    for key, value in raw.items():
        if key not in known:
            return f"{path}.{key}"
        if isinstance(value, dict):
            unknown = _first_unknown_key(value, known[key], f"{path}.{key}")
            if unknown is not None:
                return unknown
    return None
