"""What is read from a file: documents, and what was left out and why."""

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
    """Where it is in its file: its first byte, row or document number."""
    text: str


class TokenDocument(NamedTuple):
    """A document that is tokens already."""

    place: int
    tokens: npt.NDArray[np.integer]


class LeftOut(NamedTuple):
    """A document that cannot be used."""

    place: int
    reason: str
    num_bytes: int


Found = Document | TokenDocument | LeftOut


def missing_field(field: str) -> str:
    """Returns the reason of documents that lack the field of their text."""
    return f"no text in field {field!r}"


def text_document(place: int, content: bytes) -> Found:
    """Returns the document of some UTF-8, or why there is none."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return LeftOut(place, INVALID_UTF8, len(content))
    if not text or text.isspace():
        return LeftOut(place, EMPTY, len(content))
    return Document(place, text)
