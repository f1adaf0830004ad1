"""Reading the documents of a span, which is a range of one file."""

from collections.abc import Iterator

import msgspec

from paceline.data.megatron import MegatronDataset
from paceline.data.sources.documents import EMPTY, TOO_LONG, Found, LeftOut, TokenDocument
from paceline.data.sources.files import FoundFile
from paceline.data.sources.parquet import parquet_documents
from paceline.data.sources.text import json_documents, text_documents

_UNITS = {"text": "byte", "jsonl": "byte", "parquet": "row", "megatron": "document"}


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
    file, start, end = span.file, span.start, span.end
    most_bytes = options.max_document_bytes
    if file.kind == "text":
        yield from text_documents(file, start, end, options.separator, most_bytes)
    elif file.kind == "jsonl":
        yield from json_documents(file, start, end, options.field, most_bytes)
    elif end is None:
        raise AssertionError("spans of Parquet and of Megatron's files have ends")
    elif file.kind == "parquet":
        yield from parquet_documents(file, start, end, options.field, most_bytes)
    else:
        yield from _token_documents(file, start, end, most_bytes)


def describe_place(file: FoundFile, place: int) -> str:
    """Returns the location of a document as text."""
    return f"{file.name}:{_UNITS[file.kind]} {place}"


def _token_documents(file: FoundFile, start: int, end: int, most_bytes: int) -> Iterator[Found]:
    dataset = MegatronDataset(file.path, file.name)
    for number in range(start, end):
        tokens = dataset.document(number)
        if len(tokens) == 0:
            yield LeftOut(number, EMPTY, 0)
        elif tokens.nbytes > most_bytes:
            yield LeftOut(number, TOO_LONG, tokens.nbytes)
        else:
            yield TokenDocument(number, tokens)
