"""Tests that shards are fetched once, ahead of time, and evicted when the cache is full."""

import collections
import contextlib
import fcntl
import gc
import itertools
import multiprocessing
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import weakref
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import pytest

from paceline.core.errors import DataError, UsageError
from paceline.data.loader import cache as cache_module
from paceline.data.loader.cache import FetchAhead, ShardCache
from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import TokenLoader
from paceline.data.manifest import read_manifest
from paceline.data.storage import open_storage
from tests.unit.data.dataset_factory import random_documents, write_dataset
from tests.unit.data.s3_server import s3_server

SHARD_TOKENS = 1000
NUM_SHARDS = 10
DOCUMENTS = random_documents(SHARD_TOKENS * NUM_SHARDS)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as bucket:
        yield bucket


@pytest.fixture
def dataset(bucket: str) -> str:
    place = f"{bucket}/{os.urandom(4).hex()}"
    write_dataset(place, DOCUMENTS, shard_tokens=SHARD_TOKENS)
    return place


def make_config(place: str, cache: pathlib.Path, **options: Any) -> LoaderConfig:
    return LoaderConfig(
        sources=(SourceConfig(place=place),),
        cache_directory=str(cache),
        **{"context_length": 20, "batch_size": 10, "document_boundaries": True, **options},
    )


def make_cache(place: str, directory: pathlib.Path, most_bytes: int = 10**6) -> ShardCache:
    storage = open_storage(place)
    return ShardCache(
        storage, read_manifest(storage), "train", directory=directory, most_bytes=most_bytes
    )


def cached_bytes(directory: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def name_of(shard: int) -> str:
    return f"train/{shard:08d}.tokens"


def test_batches_are_those_of_a_local_directory(dataset: str, tmp_path: pathlib.Path) -> None:
    write_dataset(tmp_path / "local", DOCUMENTS, shard_tokens=SHARD_TOKENS)
    with (
        TokenLoader(make_config(dataset, tmp_path / "cache")) as remote,
        TokenLoader(make_config(str(tmp_path / "local"), tmp_path)) as local,
    ):
        for _ in range(60):
            ours, expected = next(remote), next(local)
            assert ours.digest == expected.digest
            assert np.array_equal(ours.rows, expected.rows)
            assert ours.positions is not None
            assert np.array_equal(ours.positions, expected.positions)  # type: ignore[arg-type]


def test_a_windowed_epoch_stays_within_the_cache(dataset: str, tmp_path: pathlib.Path) -> None:
    # 20,000 bytes of tokens pass through a cache of 13,000.
    config = make_config(
        dataset, tmp_path, window=50, cache_bytes=13_000, document_boundaries=False
    )
    rows = []
    with TokenLoader(config) as loader:
        for _ in range(49):
            rows.append(next(loader).rows)
            assert cached_bytes(tmp_path) <= 13_000
    assert len({tuple(row) for row in np.concatenate(rows).tolist()}) == 490


def test_orders_that_need_more_than_the_cache_are_refused(
    dataset: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(
        UsageError, match=r"19.53 KiB, but the cache only has space for 12.70 KiB.* window"
    ):
        TokenLoader(make_config(dataset, tmp_path, cache_bytes=13_000))
    with pytest.raises(UsageError, match=r"window of 200 samples .* 12 shards .* smaller window"):
        TokenLoader(make_config(dataset, tmp_path, cache_bytes=13_000, window=200))
    with pytest.raises(UsageError, match="set cache_directory"):
        TokenLoader(
            LoaderConfig(sources=(SourceConfig(place=dataset),), context_length=2, batch_size=1)
        )


def test_what_is_open_stays_and_what_was_not_used_goes_first(
    dataset: str, tmp_path: pathlib.Path
) -> None:
    cache = make_cache(dataset, tmp_path, most_bytes=4000)
    with cache.open(name_of(0)):
        cache.open(name_of(1)).close()
        cache.open(name_of(2)).close()
        left = sorted(path.name for path in tmp_path.rglob("*.tokens"))
        assert left == ["00000000.tokens", "00000002.tokens"]
        with (
            cache.open(name_of(2)),
            pytest.raises(DataError, match=r"no space .* 3.91 KiB are in use"),
        ):
            cache.open(name_of(3))
    cache.open(name_of(3)).close()
    left = sorted(path.name for path in tmp_path.rglob("*.tokens"))
    assert left == ["00000002.tokens", "00000003.tokens"]


def test_a_wrong_digest_is_an_error_with_the_name_of_the_shard(
    dataset: str, tmp_path: pathlib.Path
) -> None:
    storage = open_storage(dataset)
    content = bytearray(storage.read(name_of(3)))
    content[77] ^= 4
    storage.write(name_of(3), bytes(content))
    cache = make_cache(dataset, tmp_path)
    with pytest.raises(
        DataError, match=rf"{dataset}/{name_of(3)}: does not match its digest .*2 times"
    ):
        cache.open(name_of(3))
    assert not list(tmp_path.rglob("*.tokens"))
    with (
        TokenLoader(make_config(dataset, tmp_path)) as loader,
        pytest.raises(DataError, match=name_of(3)),
    ):
        collections.deque(itertools.islice(loader, 60), maxlen=0)


def test_a_shard_that_is_not_there_is_named(dataset: str, tmp_path: pathlib.Path) -> None:
    open_storage(dataset).delete(name_of(4))
    with pytest.raises(DataError, match=f"{name_of(4)}: listed in the manifest"):
        make_cache(dataset, tmp_path).open(name_of(4))


def test_a_file_that_is_deleted_while_it_is_opened_is_fetched_again(
    dataset: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes room between the opening of the file and its lock."""
    cache = make_cache(dataset, tmp_path)
    cache.open(name_of(0)).close()
    (path,) = tmp_path.rglob("00000000.tokens")
    lock = fcntl.flock

    def delete_and_lock(file: Any, operation: int) -> None:
        if operation == fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", lock)
            path.unlink()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", delete_and_lock)
    with cache.open(name_of(0)) as file:
        # Without a name, another process would not see that the file is in use.
        assert os.fstat(file.fileno()).st_nlink == 1


def test_a_damaged_file_of_the_cache_is_fetched_again(dataset: str, tmp_path: pathlib.Path) -> None:
    cache = make_cache(dataset, tmp_path)
    cache.open(name_of(0)).close()
    (path,) = tmp_path.rglob("*.tokens")
    os.truncate(path, 10)
    with cache.open(name_of(0)) as file:
        assert len(file.read()) == 2 * SHARD_TOKENS


@contextlib.contextmanager
def cutting_proxy(target: str, num_cuts: int) -> Iterator[tuple[str, list[int]]]:
    """Forwards connections to a server, but cuts the first `num_cuts` in the middle of a reply."""
    where = urllib.parse.urlparse(target)
    listener = socket.create_server(("127.0.0.1", 0))
    cut_at: list[int] = []

    def serve(client: socket.socket) -> None:
        server = socket.create_connection((where.hostname, where.port or 80))
        with client, server:
            threading.Thread(target=pump, args=(client, server), daemon=True).start()
            passed = 0
            with contextlib.suppress(OSError):
                while answer := server.recv(500):
                    client.sendall(answer)
                    passed += len(answer)
                    # After the headers, before the 2,000 bytes of a shard are complete.
                    if passed >= 1000 and len(cut_at) < num_cuts:
                        cut_at.append(passed)
                        break
                # Closing alone takes no effect while the other thread is blocked in a read.
                for end in (client, server):
                    end.shutdown(socket.SHUT_RDWR)

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                sink.sendall(content)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", cut_at


def test_a_connection_that_drops_in_mid_read_is_made_again(
    dataset: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = open_storage(dataset).read(name_of(5))
    cache = make_cache(dataset, tmp_path)
    with cutting_proxy(os.environ["AWS_ENDPOINT_URL"], num_cuts=2) as (endpoint, cut_at):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        cache._storage = open_storage(dataset)
        with cache.open(name_of(5)) as file:
            assert file.read() == expected
    assert len(cut_at) == 2


def _open_all(place: str, directory: pathlib.Path, results: Any) -> None:
    cache = make_cache(place, directory, most_bytes=9000)
    for _ in range(2):
        for shard in range(NUM_SHARDS):
            with cache.open(name_of(shard)) as file:
                results.put((shard, file.read()))


def test_processes_share_a_cache(dataset: str, tmp_path: pathlib.Path) -> None:
    context = multiprocessing.get_context("spawn")  # S3 clients do not survive a fork
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_open_all, args=(dataset, tmp_path, results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    read = [results.get() for _ in range(2 * 2 * NUM_SHARDS)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    storage = open_storage(dataset)
    whole = [storage.read(name_of(shard)) for shard in range(NUM_SHARDS)]
    assert all(content == whole[shard] for shard, content in read)
    assert cached_bytes(tmp_path) <= 9000


class Owner:
    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.may_go_on = threading.Event()
        self.ahead = FetchAhead(self.fetch, 2)

    def fetch(self, name: str) -> None:
        self.may_go_on.wait()
        if name == "bad":
            raise ValueError(name)
        self.fetched.append(name)


def test_names_are_fetched_once_and_errors_left_to_others() -> None:
    owner = Owner()
    for _ in range(3):
        owner.ahead.ask(["bad", "a", "b", "c"])
    owner.may_go_on.set()
    for _ in range(500):
        if len(owner.fetched) == 3:
            break
        time.sleep(0.01)
    owner.ahead.close()
    assert sorted(owner.fetched) == ["a", "b", "c"]


def test_close_begins_nothing_more() -> None:
    owner = Owner()
    owner.ahead.ask(map(str, range(100)))
    threading.Timer(0.1, owner.may_go_on.set).start()
    owner.ahead.close()
    assert len(owner.fetched) <= 2


def test_an_owner_is_not_kept_alive() -> None:
    owner = Owner()
    owner.may_go_on.set()
    owner.ahead.ask(["a"])
    time.sleep(0.05)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    assert not [thread for thread in threading.enumerate() if thread.name == "fetch-ahead"]


def test_a_program_ends_with_names_in_the_queue() -> None:
    program = (
        "import time\n"
        "from paceline.data.loader.cache import FetchAhead\n"
        "class Owner:\n"
        "    def fetch(self, name): time.sleep(0.2)\n"
        "owner = Owner()\n"
        "ahead = FetchAhead(owner.fetch, 2)\n"
        "ahead.ask(map(str, range(1000)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""


def test_a_name_may_be_asked_for_again_after_its_call() -> None:
    owner = Owner()
    owner.may_go_on.set()
    for number in (1, 2):
        owner.ahead.ask(["a"])
        for _ in range(500):
            if len(owner.fetched) == number and "a" not in owner.ahead._asked:
                break
            time.sleep(0.01)
        assert owner.fetched == ["a"] * number
    owner.ahead.close()


def _local_cache(tmp_path: pathlib.Path, **options: Any) -> ShardCache:
    if not (tmp_path / "dataset").exists():
        write_dataset(tmp_path / "dataset", DOCUMENTS, shard_tokens=SHARD_TOKENS)
    return make_cache(str(tmp_path / "dataset"), tmp_path / "deep" / "cache", **options)


def test_only_files_that_are_not_there_are_fetched_ahead(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ended: list[bool] = []

    class Ahead:
        def __init__(self, *_: object) -> None:
            pass

        def ask(self, names: Iterator[str]) -> None:
            asked.extend(names)

        def close(self) -> None:
            ended.append(True)

    monkeypatch.setattr(cache_module, "FetchAhead", Ahead)
    cache = _local_cache(tmp_path)
    cache.close()
    cache.open(name_of(1)).close()
    cache.fetch_ahead([name_of(0), name_of(1), name_of(2)])
    assert asked == [name_of(0), name_of(2)]
    cache.close()
    cache.close()
    assert ended == [True]
    # Another process may have made the directory.
    _local_cache(tmp_path).open(name_of(1)).close()


def test_opening_a_file_makes_it_the_last_that_goes(tmp_path: pathlib.Path) -> None:
    cache = _local_cache(tmp_path)
    cache.open(name_of(3)).close()
    (file,) = (path for path in (tmp_path / "deep").rglob("*.tokens"))
    os.utime(file, (1, 1))
    cache.open(name_of(3)).close()
    assert file.stat().st_mtime > time.time() - 60


def test_a_file_that_cannot_be_locked_or_is_wrong_is_closed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _local_cache(tmp_path)
    cache.open(name_of(3)).close()
    (file,) = (path for path in (tmp_path / "deep").rglob("*.tokens"))
    opened: list[BinaryIO] = []
    path_open = pathlib.Path.open

    def remember(path: pathlib.Path, *arguments: Any) -> Any:
        opened.append(path_open(path, *arguments))
        return opened[-1]

    monkeypatch.setattr(pathlib.Path, "open", remember)
    os.truncate(file, 4)
    assert cache._open_cached(name_of(3)) is None
    assert [each.closed for each in opened] == [True]

    def fail(*_: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="no locks"):
        cache._open_cached(name_of(3))
    assert [each.closed for each in opened] == [True, True]


def test_a_file_may_fill_the_cache(tmp_path: pathlib.Path) -> None:
    cache = _local_cache(tmp_path, most_bytes=2 * SHARD_TOKENS)
    cache._make_room("x", 2 * SHARD_TOKENS)
    with pytest.raises(DataError):
        cache._make_room("x", 2 * SHARD_TOKENS + 1)


@pytest.mark.parametrize(("age_s", "stays"), [(10, True), (7200, False)])
def test_what_another_process_is_writing_stays(
    age_s: float, stays: bool, tmp_path: pathlib.Path
) -> None:
    cache = _local_cache(tmp_path, most_bytes=3 * SHARD_TOKENS)
    written = tmp_path / "deep" / "cache" / "dataset" / ".partial"
    written.parent.mkdir()
    written.write_bytes(bytes(2 * SHARD_TOKENS))
    then = time.time() - age_s
    os.utime(written, (then, then))
    if stays:
        with pytest.raises(DataError):
            cache._make_room("x", 2 * SHARD_TOKENS)
    else:
        cache._make_room("x", 2 * SHARD_TOKENS)
    assert written.exists() == stays
