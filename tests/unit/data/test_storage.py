"""Tests that storages keep whole objects, locally and on a real S3 server."""

import multiprocessing
import os
import pathlib
from collections.abc import Iterator

import pytest

from paceline.core.errors import DataError, UsageError
from paceline.data import storage as storage_module
from paceline.data.storage import Storage, open_storage
from tests.unit.data.s3_server import s3_server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server() as bucket:
        yield bucket


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Storage:
    if request.param == "local":
        return open_storage(tmp_path / "dataset")
    return open_storage(f"{request.getfixturevalue('s3')}/{os.urandom(4).hex()}")


def test_objects_come_back_whole_and_in_parts(storage: Storage) -> None:
    content = bytes(range(256)) * 5
    storage.write("train/0.tokens", memoryview(content))
    storage.write("empty", b"")
    assert storage.read("train/0.tokens") == content
    assert storage.read_range("train/0.tokens", 3, 700) == content[3:700]
    assert storage.sizes() == {"train/0.tokens": 1280, "empty": 0}
    assert storage.sizes("train") == {"train/0.tokens": 1280}
    storage.write("train/0.tokens", b"new")
    assert storage.read("train/0.tokens") == b"new"
    storage.delete("train/0.tokens")
    storage.delete("train/0.tokens")
    assert storage.sizes() == {"empty": 0}


def test_what_is_not_there_is_named(storage: Storage) -> None:
    storage.write("short", b"abc")
    with pytest.raises(FileNotFoundError, match="absent"):
        storage.read("absent")
    with pytest.raises(DataError, match=r"short ends at byte 3, before byte 9"):
        storage.read_range("short", 1, 9)


def test_a_writer_that_fails_leaves_nothing(tmp_path: pathlib.Path) -> None:
    storage = open_storage(tmp_path)
    storage.write("tokens", b"old")
    with pytest.raises(TypeError):
        storage.write("tokens", "text is not bytes")  # type: ignore[arg-type]
    assert storage.read("tokens") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_what_a_killed_writer_left_is_not_listed(tmp_path: pathlib.Path) -> None:
    (tmp_path / ".unfinished-x").write_bytes(b"half")
    assert open_storage(tmp_path).sizes() == {}


def test_directories_go_with_their_last_file(tmp_path: pathlib.Path) -> None:
    storage = open_storage(tmp_path)
    storage.write("_work/pieces/0", b"")
    storage.delete("_work/pieces/0")
    assert not list(tmp_path.iterdir())


def test_other_places_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="gs://bucket: not a place"):
        open_storage("gs://bucket")


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    # Without credentials, the first request goes to the host's metadata service.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
    with pytest.raises(DataError, match=r"s3://bucket/data/x: .*4 times; check AWS_ENDPOINT_URL"):
        open_storage("s3://bucket/data").read("x")


def _read_in_fork(storage: Storage, results: "multiprocessing.SimpleQueue[str]") -> None:
    try:
        storage.read("name")
    except DataError as error:
        results.put(str(error))


def test_a_fork_that_would_hang_is_refused(s3: str) -> None:
    storage = open_storage(f"{s3}/fork")
    storage.write("name", b"")
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_read_in_fork, args=(storage, results))
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert "start workers with spawn" in results.get()


def test_an_object_is_created_once(storage: Storage) -> None:
    assert storage.create("step-1/manifest.json", b"first")
    assert not storage.create("step-1/manifest.json", b"second")
    assert storage.create("step-1/manifest.json", b"first")
    assert storage.read("step-1/manifest.json") == b"first"
    assert list(storage.sizes()) == ["step-1/manifest.json"]


def test_a_password_in_the_endpoint_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:canary-secret@127.0.0.1:9/")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(storage_module, "_FIRST_PAUSE_S", 0.0)
    with pytest.raises(DataError) as caught:
        open_storage("s3://bucket/prefix").read("name")
    assert "127.0.0.1:9" in str(caught.value)
    assert "canary-secret" not in str(caught.value)
