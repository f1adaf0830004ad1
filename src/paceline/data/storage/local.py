"""A directory as a storage."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from paceline.core.errors import DataError, TruncatedError

_UNFINISHED = ".unfinished-"


class LocalStorage:
    """The files below a directory, which the first write creates.

    Args:
        directory: The directory of the files.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = pathlib.Path(directory)

    @property
    def url(self) -> str:
        """The directory's path."""
        return str(self.directory)

    def path(self, name: str) -> pathlib.Path:
        """Returns the path of an object's file, for example to memory-map it."""
        return self.directory / name

    def read(self, name: str) -> bytes:
        """Returns a whole file."""
        return self.path(name).read_bytes()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Returns a part of a file."""
        with self.path(name).open("rb") as file:
            file.seek(start)
            content = file.read(end - start)
        if len(content) < end - start:
            raise TruncatedError(
                f"{self.path(name)} ends at byte {start + len(content)}, before byte {end}; it is "
                "truncated: prepare the dataset again"
            )
        return content

    def write(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Writes a temporary sibling and renames it."""
        with _unfinished(self.path(name), content) as unfinished:
            unfinished.replace(self.path(name))

    def create(self, name: str, content: bytes | bytearray | memoryview) -> bool:
        """Writes a temporary sibling and hard-links it to the name, if the name is free."""
        with _unfinished(self.path(name), content) as unfinished:
            try:
                self.path(name).hardlink_to(unfinished)
            except FileExistsError:
                return self.read(name) == content
        return True

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Returns the sizes of the files below a prefix, without partial files."""
        return {
            path.relative_to(self.directory).as_posix(): path.stat().st_size
            for path in sorted(self.path(prefix).rglob("*"))
            if path.is_file() and not path.name.startswith(_UNFINISHED)
        }

    def delete(self, name: str) -> None:
        """Deletes a file, and its parent directories that are now empty."""
        path = self.path(name)
        path.unlink(missing_ok=True)
        for parent in path.relative_to(self.directory).parents[:-1]:
            try:
                (self.directory / parent).rmdir()
            except OSError:
                break

    def clear(self, prefix: str) -> None:
        """Deletes a directory and its contents."""
        shutil.rmtree(self.path(prefix), ignore_errors=True)

    def discard_unfinished(self) -> None:
        """Deletes temporary siblings that were never renamed."""
        for path in self.directory.rglob(f"{_UNFINISHED}*"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _unfinished(
    path: pathlib.Path, content: bytes | bytearray | memoryview
) -> Iterator[pathlib.Path]:
    """Yields a temporary sibling with the content; deletes it unless it was renamed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(prefix=_UNFINISHED, dir=path.parent)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123  (a descriptor has no path)
                os.fchmod(descriptor, 0o644)  # The usual mode; mkstemp creates private files.
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            yield pathlib.Path(unfinished)
        finally:
            with contextlib.suppress(OSError):
                pathlib.Path(unfinished).unlink()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written: {error.strerror}; free disk space, or name another place"
        ) from error
