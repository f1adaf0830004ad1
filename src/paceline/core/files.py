"""Files that exist in full or not at all: written under another name, then renamed or linked.

A writer that is killed leaves only a hidden sibling whose name starts with `UNFINISHED`. What a
user names to be read, and cannot be, is a usage error.
"""

import contextlib
import os
import pathlib
import secrets
from collections.abc import Iterator
from typing import IO

from paceline.core.errors import UsageError

UNFINISHED = ".unfinished-"
"""Prefix of the names of files that are being written."""


def read_named(path: pathlib.Path, remedy: str) -> bytes:
    """Returns the bytes of a file that a user has named; raises with the remedy if it has none."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path}: no such file; {remedy}") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; {remedy}") from error


@contextlib.contextmanager
def atomic_file(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Yields a file to write, which replaces `path` when the context ends without an error."""
    with _unfinished(path) as file:
        yield file
        _make_durable(file)
        pathlib.Path(file.name).replace(path)


def create_atomically(path: pathlib.Path, content: bytes | bytearray | memoryview) -> bool:
    """Writes a file unless `path` exists; returns whether it was written."""
    with _unfinished(path) as file:
        file.write(content)
        _make_durable(file)
        try:
            path.hardlink_to(file.name)
        except FileExistsError:
            return False
    return True


@contextlib.contextmanager
def _unfinished(path: pathlib.Path) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
    # Created as any other file is, with the mode that the user's umask leaves.
    with unfinished.open("xb") as file:
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()


def _make_durable(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
