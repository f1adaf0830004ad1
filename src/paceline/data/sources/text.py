"""Documents from text files and JSON Lines."""

import codecs
import functools
from collections.abc import Iterator

import msgspec

from paceline.data.sources.cutting import Part, cut, first_byte
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
from paceline.data.sources.files import FoundFile
from paceline.data.sources.streams import read_chunks
from paceline.records.codecs import UNDECODABLE

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
