"""The bytes of a file in chunks, decompressed if necessary, in bounded memory.

A file that is truncated, or that expands far more than text does, is an error that names the file.
"""

import gzip
import pathlib
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from paceline.core.errors import DataError, UsageError
from paceline.core.units import GIB, MIB, format_binary_bytes
from paceline.data.sources.files import FoundFile

CHUNK_BYTES = MIB
MOST_EXPANSION = 200
"""Maximum expansion ratio of a compressed file; text rarely reaches 10."""
HARMLESS_BYTES = GIB
"""Decompressed size up to which any expansion is accepted."""

_ZSTD_INPUT_BYTES = 1024
"""Input bytes per call to zstd: in the worst case, 4 bytes expand to 128 KiB."""
_ZSTD_WINDOW_BYTES = 128 * MIB


def read_chunks(file: FoundFile, start: int = 0) -> Iterator[bytes]:
    """Yields the bytes of a file from `start`; for a compressed file, all decompressed bytes."""
    try:
        with pathlib.Path(file.path).open("rb") as opened:
            if file.compression is None:
                opened.seek(start)
                while chunk := opened.read(CHUNK_BYTES):
                    yield chunk
                return
            decompress = _gzip_chunks if file.compression == "gzip" else _zstd_chunks
            num_bytes = 0
            for chunk in decompress(opened, file.name):
                num_bytes += len(chunk)
                _require_sane(file, num_bytes)
                yield chunk
    except OSError as error:
        raise DataError(f"{file.name}: cannot be read: {error.strerror or error}") from error


def _gzip_chunks(opened: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=opened) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except EOFError as error:
        raise _truncated(name, "gzip") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(name, "gzip", error) from error


def _zstd_chunks(opened: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{name}: zstd needs the package zstandard; pip install 'paceline[zstd]'"
        ) from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    frame = decompressor.decompressobj()
    is_between = True
    try:
        while content := opened.read(_ZSTD_INPUT_BYTES):
            while content:
                is_between = False
                if chunk := frame.decompress(content):
                    yield chunk
                content = b""
                if frame.eof:  # Another frame may follow.
                    content, frame = frame.unused_data, decompressor.decompressobj()
                    is_between = True
    except zstandard.ZstdError as error:
        raise _damaged(name, "zstd", error) from error
    if not is_between:
        raise _truncated(name, "zstd")


def _require_sane(file: FoundFile, num_bytes: int) -> None:
    if num_bytes > max(HARMLESS_BYTES, MOST_EXPANSION * file.num_bytes):
        raise DataError(
            f"{file.name}: {format_binary_bytes(file.num_bytes)} that expand to more than "
            f"{format_binary_bytes(num_bytes)}, over {MOST_EXPANSION} times as much: not text; "
            "leave it out, or decompress it first"
        )


def _truncated(name: str, what: str) -> DataError:
    return DataError(
        f"{name}: truncated: the file ends before its {what} data does; fetch it again"
    )


def _damaged(name: str, what: str, error: Exception) -> DataError:
    return DataError(f"{name}: damaged {what} data: {error}; fetch it again")
