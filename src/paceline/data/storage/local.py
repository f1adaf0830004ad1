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
    """The files below a directory, which is made with the first of them.

    Args:
        directory: Where the files are.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = pathlib.Path(directory)

    @property
    def url(self) -> str:
        """The directory's path."""
        return str(self.directory)

    def path(self, name: str) -> pathlib.Path:
        """Returns where an object's file is, so that it can be memory-mapped."""
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
        """Writes a sibling first, which then takes the name."""
        with _unfinished(self.path(name), content) as unfinished:
            unfinished.replace(self.path(name))

    def create(self, name: str, content: bytes | bytearray | memoryview) -> bool:
        """Writes a sibling first, which then gets the name too, if nobody has it."""
        with _unfinished(self.path(name), content) as unfinished:
            try:
                self.path(name).hardlink_to(unfinished)
            except FileExistsError:
                return self.read(name) == content
        return True

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Walks the directory below a prefix; what a killed writer left behind is not listed."""
        return {
            path.relative_to(self.directory).as_posix(): path.stat().st_size
            for path in sorted(self.path(prefix).rglob("*"))
            if path.is_file() and not path.name.startswith(_UNFINISHED)
        }

    def delete(self, name: str) -> None:
        """Removes a file, and the directories that are empty without it."""
        path = self.path(name)
        path.unlink(missing_ok=True)
        for parent in path.relative_to(self.directory).parents[:-1]:
            try:
                (self.directory / parent).rmdir()
            except OSError:
                break

    def clear(self, prefix: str) -> None:
        """Removes a directory with all that is in it."""
        shutil.rmtree(self.path(prefix), ignore_errors=True)

    def discard_unfinished(self) -> None:
        """Removes the siblings of files that never took their names."""
        for path in self.directory.rglob(f"{_UNFINISHED}*"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _unfinished(
    path: pathlib.Path, content: bytes | bytearray | memoryview
) -> Iterator[pathlib.Path]:
    """Yields a sibling with the content, which is gone afterwards unless it was renamed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(prefix=_UNFINISHED, dir=path.parent)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123  (a descriptor has no path)
                os.fchmod(descriptor, 0o644)  # As ordinary files are; mkstemp's are private.
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
