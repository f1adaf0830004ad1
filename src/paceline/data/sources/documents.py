"""The results of reading a file: documents, and dropped documents with reasons."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

INVALID_UTF8 = "invalid UTF-8"
TOO_LONG = "too long"
EMPTY = "empty"
INVALID_JSON = "invalid JSON"
UNKNOWN_KIND = "file of unknown kind"
DUPLICATE = "duplicate"


class Document(NamedTuple):
    """A document of text."""

    place: int
    """Its location in the file: first byte, row or document number."""
    text: str


class TokenDocument(NamedTuple):
    """A document that is already tokenized."""

    place: int
    tokens: npt.NDArray[np.integer]


class LeftOut(NamedTuple):
    """A document that cannot be used."""

    place: int
    reason: str
    num_bytes: int


Found = Document | TokenDocument | LeftOut


def missing_field(field: str) -> str:
    """Returns the drop reason for documents without the text field."""
    return f"no text in field {field!r}"


def text_document(place: int, content: bytes) -> Found:
    """Decodes a document from UTF-8, or returns the reason why it is dropped."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return LeftOut(place, INVALID_UTF8, len(content))
    if not text or text.isspace():
        return LeftOut(place, EMPTY, len(content))
    return Document(place, text)
