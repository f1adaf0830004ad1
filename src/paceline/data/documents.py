r"""The documents of source files: of text, JSON Lines, Parquet and Megatron's indexed datasets.

`read_span` yields the documents of a range of a file, and the reasons why others are left out, in
bounded memory for documents of any size. Text is split at a separator. A document belongs to the
range in which it starts, so ranges that cover a file cover each of its documents exactly once. This
requires a separator that cannot overlap itself; a file with any other separator (such as a blank
line, ``\n\n``) is read as a single range.
"""

import codecs
import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError, UsageError
from paceline.core.units import MIB
from paceline.data.megatron import MegatronDataset
from paceline.data.source_files import FoundFile, read_chunks, require_sane
from paceline.records.store import UNDECODABLE

if TYPE_CHECKING:
    from pyarrow.parquet import ColumnChunkMetaData, ParquetFile

INVALID_UTF8 = "invalid UTF-8"
TOO_LONG = "too long"
EMPTY = "empty"
INVALID_JSON = "invalid JSON"
UNKNOWN_KIND = "file of unknown kind"
OUTSIDE_LINK = "link that leads out of its directory"
DUPLICATE = "duplicate"

_UNITS = {"text": "byte", "jsonl": "byte", "parquet": "row", "megatron": "document"}
_LINE_END = b"\n"
_PARQUET_BATCH_BYTES = 4 * MIB
_MOST_ROWS, _MOST_EXPANDED_ROWS = 4096, 256
_HARMLESS_PARQUET_BYTES = 256 * MIB
"""Bytes of text up to which a Parquet file of any size is accepted."""
_MOST_WHOLE_BYTES = 256 * MIB
"""Bytes up to which a column of a row group is read whole."""


class Document(NamedTuple):
    """A document of text."""

    location: int
    """Its location in the file: first byte, row or document number."""
    text: str


class TokenDocument(NamedTuple):
    """A document that is already tokenized."""

    location: int
    tokens: npt.NDArray[np.integer]


class LeftOut(NamedTuple):
    """A document that cannot be used."""

    location: int
    reason: str
    num_bytes: int


Found = Document | TokenDocument | LeftOut


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that determine the documents of a file."""

    separator: bytes
    field: str
    max_document_bytes: int


class SourceSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a file: of bytes, of row groups (Parquet), or of documents (Megatron)."""

    file: FoundFile
    start: int
    end: int | None
    """None for the end of the file."""
    num_bytes: int
    """Bytes to read, for the progress bar."""


def read_span(span: SourceSpan, options: ReadOptions) -> Iterator[Found]:
    """Yields the documents of a span in order."""
    readers = {
        "text": _text_documents,
        "jsonl": _json_documents,
        "parquet": _parquet_documents,
        "megatron": _token_documents,
    }
    return readers[span.file.kind](span, options)


def describe_location(file: FoundFile, location: int) -> str:
    """Returns the location of a document as text."""
    return f"{file.name}:{_UNITS[file.kind]} {location}"


def _text_documents(span: SourceSpan, options: ReadOptions) -> Iterator[Found]:
    for part in _parts(span, options.separator, options.max_document_bytes):
        if part.content is None:
            yield LeftOut(part.start, TOO_LONG, part.num_bytes)
        # The text after the last separator is a document only if it is not blank.
        elif part.content.strip() or part.start == 0 or not part.is_last:
            yield _text_document(part.start, part.content)


def _text_document(location: int, content: bytes) -> Found:
    """Decodes a document from UTF-8, or returns the reason why it is dropped."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return LeftOut(location, INVALID_UTF8, len(content))
    if not text or text.isspace():
        return LeftOut(location, EMPTY, len(content))
    return Document(location, text)


def _json_documents(span: SourceSpan, options: ReadOptions) -> Iterator[Found]:
    """Yields a field of each line; skips blank lines."""
    decode = _row_decoder(options.field).decode
    for start, line, num_bytes, _ in _parts(span, _LINE_END, options.max_document_bytes):
        if line is None:
            yield LeftOut(start, TOO_LONG, num_bytes)
            continue
        try:
            text: str = decode(line).text
        except UNDECODABLE as error:
            if line.strip():
                yield LeftOut(start, _reason(line, options.field, error), num_bytes)
            continue
        if text and not text.isspace():
            yield Document(start, text)
        else:
            yield LeftOut(start, EMPTY, num_bytes)


@functools.lru_cache(maxsize=1)
def _row_decoder(field: str) -> msgspec.json.Decoder:  # type: ignore[type-arg]
    """Returns a decoder of one field of an object; it skips other fields without decoding."""
    row = msgspec.defstruct("Row", [("text", str)], rename={"text": field}, gc=False)
    return msgspec.json.Decoder(row)


def _reason(line: bytes, field: str, error: Exception) -> str:
    try:
        line.decode()
    except UnicodeDecodeError:
        return INVALID_UTF8
    # A validation error means valid JSON, but not an object with a string field of that name.
    return _missing_field(field) if isinstance(error, msgspec.ValidationError) else INVALID_JSON


def _missing_field(field: str) -> str:
    return f"no text in field {field!r}"


def _token_documents(span: SourceSpan, options: ReadOptions) -> Iterator[Found]:
    assert span.end is not None
    dataset = MegatronDataset(span.file.path, span.file.name)
    for number in range(span.start, span.end):
        tokens = dataset.document(number)
        if len(tokens) == 0:
            yield LeftOut(number, EMPTY, 0)
        elif tokens.nbytes > options.max_document_bytes:
            yield LeftOut(number, TOO_LONG, tokens.nbytes)
        else:
            yield TokenDocument(number, tokens)


def _parquet_documents(span: SourceSpan, options: ReadOptions) -> Iterator[Found]:
    assert span.end is not None
    row, chunks = _column_chunks(span.file, options.field, span.start, span.end)
    # A text that a page has once can be the value of any number of rows.
    has_dictionary = all(any("DICTIONARY" in name for name in each.encodings) for each in chunks)
    num_bytes = 0
    with _open_parquet(
        span.file,
        read_dictionary=[options.field] if has_dictionary else None,
        # A buffered page takes the memory that it claims to need, in a file of any size. A chunk
        # that is not buffered is read whole.
        buffer_size=MIB if _largest(chunks) > _MOST_WHOLE_BYTES else 0,
    ) as opened:
        for number, chunk in enumerate(chunks, start=span.start):
            num_rows = (
                _PARQUET_BATCH_BYTES * chunk.num_values // max(1, chunk.total_uncompressed_size)
            )
            # Without dictionaries, the sizes of a hostile file may be far from the truth.
            most_rows = _MOST_ROWS if has_dictionary else _MOST_EXPANDED_ROWS
            for batch in opened.iter_batches(
                batch_size=min(most_rows, max(1, num_rows)),
                row_groups=[number],
                columns=[options.field],
                use_threads=False,
            ):
                for content in _texts(batch.column(0), has_dictionary):
                    num_bytes += len(content or b"")
                    require_sane(span.file, num_bytes, _HARMLESS_PARQUET_BYTES)
                    if content is None:
                        yield LeftOut(row, _missing_field(options.field), 0)
                    elif len(content) > options.max_document_bytes:
                        yield LeftOut(row, TOO_LONG, len(content))
                    else:
                        yield _text_document(row, content)
                    row += 1


def _texts(column: Any, has_dictionary: bool) -> Iterator[bytes | None]:
    """Yields texts as bytes: Parquet requires UTF-8 but does not validate it."""
    import pyarrow

    kind = pyarrow.large_binary()
    if not has_dictionary:
        yield from column.cast(kind).to_pylist()
        return
    dictionary = column.dictionary.cast(kind)
    # Raises if an index lies outside of the dictionary.
    pyarrow.DictionaryArray.from_arrays(column.indices, dictionary)
    values = dictionary.to_pylist()
    for index in column.indices.to_pylist():
        yield None if index is None else values[index]


def row_group_bytes(file: FoundFile, field: str) -> list[int]:
    """Returns the bytes of text in each row group, from the footer of the file."""
    _, chunks = _column_chunks(file, field)
    return [chunk.total_uncompressed_size for chunk in chunks]


def _column_chunks(
    file: FoundFile, field: str, start: int = 0, end: int | None = None
) -> tuple[int, "list[ColumnChunkMetaData]"]:
    """Returns the number of rows before a range of row groups, and what the footer says of each."""
    # Mapped, so that only what is looked at is read.
    with _open_parquet(file, memory_map=True) as opened:
        column = _column(opened, file, field)
        groups = range(opened.metadata.num_row_groups)[:end]
        for group in groups[start:]:
            # Where a first row can be read, pyarrow can describe the column. Where it cannot,
            # reading raises an error, but describing the column would end the process.
            rows = opened.iter_batches(
                batch_size=1, row_groups=[group], columns=[field], use_threads=False
            )
            next(rows, None)
        metadata = [opened.metadata.row_group(group) for group in groups]
        first_row = sum(each.num_rows for each in metadata[:start])
        return first_row, [each.column(column) for each in metadata[start:]]


def _largest(chunks: "Sequence[ColumnChunkMetaData]") -> int:
    return max((chunk.total_compressed_size for chunk in chunks), default=0)


@contextlib.contextmanager
def _open_parquet(file: FoundFile, **options: Any) -> "Iterator[ParquetFile]":
    """Opens a file with options of `ParquetFile`."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{file.name}: Parquet needs the package pyarrow; pip install 'paceline[parquet]'"
        ) from error
    try:
        with ParquetFile(file.path, pre_buffer=False, **options) as opened:
            yield opened
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        first_line = str(error).partition("\n")[0]
        raise DataError(f"{file.name}: truncated or damaged Parquet: {first_line}") from error


def _column(opened: "ParquetFile", file: FoundFile, field: str) -> int:
    """Returns the index of the text column."""
    import pyarrow

    schema = opened.schema_arrow
    index = schema.get_field_index(field)
    if index < 0:
        raise UsageError(
            f"{file.name}: no column {field!r}; it has {', '.join(schema.names)}: name one "
            "with --field"
        )
    kind = schema.field(index).type
    is_text = (
        pyarrow.types.is_string(kind)
        or pyarrow.types.is_large_string(kind)
        or pyarrow.types.is_binary(kind)
        or pyarrow.types.is_large_binary(kind)
    )
    if not is_text:
        raise UsageError(f"{file.name}: column {field!r} contains {kind}, not text")
    # Nested fields are several columns in the file, so the index is looked up by path.
    paths = [opened.schema.column(i).path for i in range(len(opened.schema))]
    return paths.index(field)


def _parts(span: SourceSpan, separator: bytes, most_bytes: int) -> Iterator["Part"]:
    chunks = read_chunks(span.file, first_byte(span.start, separator))
    for part in cut(chunks, separator, start=span.start, end=span.end, most_bytes=most_bytes):
        if part.start == 0 and part.content is not None:
            # A byte order mark is not part of the text.
            part = part._replace(content=part.content.removeprefix(codecs.BOM_UTF8))
        yield part


class Part(NamedTuple):
    """The bytes between two separators."""

    start: int
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
            following = part.start + part.num_bytes + len(separator)
            if end is not None and following >= end:
                return
            part = _Unfinished(following, most_bytes, is_wanted=True)
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

    def __init__(self, start: int, most_bytes: int, *, is_wanted: bool) -> None:
        self.start = start
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
        return Part(self.start, content, self.num_bytes, is_last)
