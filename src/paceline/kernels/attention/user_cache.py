"""Small JSON files in the user's cache directory: what one process found out, later ones read."""

import contextlib
import fcntl
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from paceline.core.files import atomic_file

_LOGGER = logging.getLogger(__name__)

Entry = TypeVar("Entry")


class UserCache(Generic[Entry]):
    """A file of entries by key. A file that cannot be used is reported and treated as empty."""

    def __init__(self, file_name: str, entry_type: type[Entry]) -> None:
        self._file_name = file_name
        self._entry_type = entry_type

    @property
    def path(self) -> pathlib.Path:
        """Where the file is, below XDG_CACHE_HOME or ~/.cache."""
        directory = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        return pathlib.Path(directory, "paceline", self._file_name)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes this user's other processes wait before they look up or find out the same."""
        path = self.path.with_suffix(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("w")
        except OSError:
            yield  # Without a writable directory there is nothing to share.
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read(self) -> dict[str, Entry]:
        """Returns all entries."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, self._entry_type])
        except (FileNotFoundError, RuntimeError):  # The latter if the user has no home directory.
            return {}
        except (OSError, msgspec.DecodeError) as error:
            _LOGGER.warning("%s cannot be read and is not used: %s", self.path, error)
            return {}

    def add(self, key: str, entry: Entry) -> None:
        """Adds or replaces an entry; call it while `locked`.

        The file is replaced atomically, so that no reader sees half of it.
        """
        content = msgspec.json.encode(self.read() | {key: entry})
        try:
            with atomic_file(self.path) as file:
                file.write(content)
        except OSError as error:
            _LOGGER.warning("the entry for %s was not kept in %s: %s", key, self.path, error)
