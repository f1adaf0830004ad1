"""Storage for datasets: a local directory or a prefix of an S3 bucket, behind one protocol.

Invariant of every storage: a name refers to a complete object or to none. A killed writer leaves
nothing that a reader would mistake for data. S3, through obstore, writes objects atomically. Its
credentials, region and endpoint come from the usual environment variables: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL.
"""

import contextlib
import functools
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from paceline.core.errors import DataError, TruncatedError, UsageError
from paceline.core.files import UNFINISHED, atomic_file, create_atomically
from paceline.core.processes import back_off_s

if TYPE_CHECKING:
    from obstore.store import S3Store


_S3 = "s3://"
_CREDENTIALS = re.compile(r"//[^/?#\s]*@")
_REFUSED = re.compile(r"status code: 40[13]\b")
"""In the text of an error: listing raises the same kind of error whatever the server answered."""
_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.2
_DELETED_TOGETHER = 1000

_Result = TypeVar("_Result")


class Storage(Protocol):
    """Objects by name; the parts of a name are separated by slashes."""

    @property
    def url(self) -> str:
        """The location of the storage, as a user would write it."""

    def read(self, name: str) -> bytes:
        """Returns a whole object; raises FileNotFoundError if there is none."""

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes in [`start`, `end`); raises if the object is shorter."""

    def write(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Writes or replaces an object atomically."""

    def create(self, name: str, content: bytes | bytearray | memoryview) -> bool:
        """Writes an object unless one exists; returns whether it now has the given content."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Returns the size in bytes of every object below a prefix, by name."""

    def delete(self, name: str) -> None:
        """Deletes an object; does nothing if there is none."""

    def clear(self, prefix: str) -> None:
        """Deletes all objects below a prefix."""

    def discard_unfinished(self) -> None:
        """Deletes partial files of killed writers; no process may be writing."""


def open_storage(location: str | os.PathLike[str]) -> Storage:
    """Returns the storage at a directory or at ``s3://bucket/prefix``."""
    text = os.fspath(location)
    if text.startswith(_S3):
        return S3Storage(text)
    if "://" in text:
        raise UsageError(f"{text}: not a place for data; name a directory or s3://bucket/prefix")
    return LocalStorage(text)


class LocalStorage:
    """The files below a directory, which the first write creates."""

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
        return _whole(content, start, end, str(self.path(name)))

    def write(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Writes a temporary sibling and renames it."""
        with _writing(self.path(name)), atomic_file(self.path(name)) as file:
            file.write(content)

    def create(self, name: str, content: bytes | bytearray | memoryview) -> bool:
        """Writes a temporary sibling and hard-links it to the name, if the name is free."""
        with _writing(self.path(name)):
            return create_atomically(self.path(name), content) or self.read(name) == content

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Returns the sizes of the files below a prefix, without partial files."""
        return {
            path.relative_to(self.directory).as_posix(): path.stat().st_size
            for path in sorted(self.path(prefix).rglob("*"))
            if path.is_file() and not path.name.startswith(UNFINISHED)
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
        for path in self.directory.rglob(f"{UNFINISHED}*"):
            path.unlink(missing_ok=True)


def _whole(content: bytes, start: int, end: int, where: str) -> bytes:
    if len(content) < end - start:
        raise TruncatedError(
            f"{where} ends at byte {start + len(content)}, before byte {end}; it is truncated: "
            "prepare the dataset again"
        )
    return content


@contextlib.contextmanager
def _writing(path: pathlib.Path) -> Iterator[None]:
    """Raises a `DataError` if a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written: {error.strerror}; free disk space, or name another place"
        ) from error


class S3Storage:
    """The objects below ``s3://bucket/prefix``."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._made: S3Store | None = None

    def read(self, name: str) -> bytes:
        """Fetches a whole object."""
        import obstore

        return self._retried(name, lambda: bytes(obstore.get(self._store(), name).bytes()))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Fetches a byte range of an object."""
        import obstore

        content = self._retried(
            name, lambda: bytes(obstore.get_range(self._store(), name, start=start, end=end))
        )
        return _whole(content, start, end, f"{self.url}/{name}")

    def write(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Uploads an object, in parts if it is large."""
        import obstore

        whole = bytes(content)
        try:
            self._retried(name, lambda: obstore.put(self._store(), name, whole))
        except FileNotFoundError as error:
            raise DataError(f"{self.url}: no such bucket; create it first") from error

    def create(self, name: str, content: bytes | bytearray | memoryview) -> bool:
        """Uploads an object, unless the server has one with this name."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        whole = bytes(content)

        def put() -> bool:
            try:
                obstore.put(self._store(), name, whole, mode="create", use_multipart=False)
            except AlreadyExistsError:
                # It may be ours: the response to an earlier attempt may have been lost.
                return self.read(name) == whole
            return True

        return self._retried(name, put)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Returns the sizes of the objects below a prefix."""
        import obstore

        chunks = self._retried(prefix, lambda: list(obstore.list(self._store(), prefix or None)))
        return {found["path"]: found["size"] for chunk in chunks for found in chunk}

    def delete(self, name: str) -> None:
        """Deletes an object."""
        import obstore

        self._retried(name, lambda: obstore.delete(self._store(), name))

    def clear(self, prefix: str) -> None:
        """Deletes the objects below a prefix in batches."""
        import obstore

        names = list(self.sizes(prefix))
        for start in range(0, len(names), _DELETED_TOGETHER):
            chosen = names[start : start + _DELETED_TOGETHER]
            self._retried(prefix, functools.partial(obstore.delete, self._store(), chosen))

    def discard_unfinished(self) -> None:
        """Does nothing: S3 does not show partial objects."""

    def __getstate__(self) -> dict[str, object]:
        return {"url": self.url, "_made": None}  # Each worker creates its own client.

    def _store(self) -> "S3Store":
        # The threads that serve the requests of all clients do not survive a fork: a request would
        # wait forever.
        if _first_user() != os.getpid():
            raise DataError(
                f"{self.url}: S3 was used before this process was forked; start workers with spawn "
                "or forkserver"
            )
        if self._made is None:
            self._made = _connect(self.url)
        return self._made

    def _retried(self, name: str, request: Callable[[], _Result]) -> _Result:
        """Retries a failed request with exponential backoff."""
        from obstore.exceptions import BaseError, NotFoundError

        for attempt in range(_ATTEMPTS):
            try:
                return request()
            except (NotFoundError, FileNotFoundError) as error:
                raise FileNotFoundError(f"{self.url}/{name}: no such object") from error
            except BaseError as error:
                if _REFUSED.search(str(error)):
                    raise DataError(
                        f"{self.url}/{name}: the server refuses the request; check the credentials "
                        "and their rights to the bucket"
                    ) from error
                if attempt == _ATTEMPTS - 1:
                    raise DataError(
                        f"{self.url}/{name}: {_first_line(error)}, {_ATTEMPTS} times; check "
                        "AWS_ENDPOINT_URL, the credentials and the network"
                    ) from error
                time.sleep(back_off_s(attempt + 1, _FIRST_PAUSE_S))
        raise AssertionError("unreachable")


@functools.cache
def _first_user() -> int:
    return os.getpid()


def _connect(url: str) -> "S3Store":
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{url}: S3 needs the package obstore; pip install 'paceline[s3]'"
        ) from error
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    # Plain HTTP is allowed only if the endpoint requests it, as for a local server.
    return S3Store.from_url(
        url,
        client_options={"allow_http": endpoint.startswith("http://")},
        # obstore retries as well; each of our attempts starts from the beginning.
        retry_config={"max_retries": 2},
    )


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error, without the password of a URL in it."""
    return _CREDENTIALS.sub("//", str(error).strip().partition("\n")[0])
