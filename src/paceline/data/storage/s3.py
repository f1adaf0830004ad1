"""A prefix of an S3 bucket as a storage, through obstore.

Credentials, region and endpoint come from the usual environment variables: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL. S3 writes objects atomically.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from paceline.core.errors import DataError, TruncatedError, UsageError

if TYPE_CHECKING:
    from obstore.store import S3Store

_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.2
_DELETED_TOGETHER = 1000

_Result = TypeVar("_Result")


class S3Storage:
    """The objects below ``s3://bucket/prefix``.

    Args:
        url: The bucket and the prefix.
    """

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
        if len(content) < end - start:
            raise TruncatedError(
                f"{self.url}/{name} ends at byte {start + len(content)}, before byte {end}; it is "
                "truncated: prepare the dataset again"
            )
        return content

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
                if attempt == _ATTEMPTS - 1:
                    raise DataError(
                        f"{self.url}/{name}: {_first_line(error)}, {_ATTEMPTS} times; check "
                        "AWS_ENDPOINT_URL, the credentials and the network"
                    ) from error
                time.sleep(_FIRST_PAUSE_S * 2**attempt)
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
    return str(error).strip().partition("\n")[0]
