"""Tests that a damaged dataset is found, and that document lengths are counted."""

import collections
import pathlib
import re
from collections.abc import Callable

import blake3
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import DataError
from paceline.data import inspect as verify_module
from paceline.data.inspect import document_beginnings, document_lengths, verify
from paceline.data.manifest import (
    DOCUMENT_END_DTYPE,
    MANIFEST,
    DatasetManifest,
    documents_name,
    encode_manifest,
    read_manifest,
)
from paceline.data.storage import LocalStorage
from tests.unit.data.dataset_factory import END_OF_DOCUMENT, write_dataset


@pytest.fixture
def storage(tmp_path: pathlib.Path) -> LocalStorage:
    documents = [np.arange(1, 2 + number % 7) for number in range(20)]
    write_dataset(tmp_path, documents, shard_tokens=16)
    return LocalStorage(tmp_path)


def _findings(storage: LocalStorage) -> list[str]:
    return [str(finding) for finding in verify(storage, read_manifest(storage))]


def _flip_a_bit(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def _cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("part_bytes", [2, 6, 2**24])
def test_an_intact_dataset_has_no_findings(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(verify_module, "_PART_BYTES", part_bytes)
    told: list[tuple[int, int]] = []
    manifest = read_manifest(storage)
    assert not list(verify(storage, manifest, lambda done, total: told.append((done, total))))
    assert told[-1][0] == told[-1][1] > 0


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train/00000001.tokens", _flip_a_bit, "digest: .*train/00000001.tokens does not match"),
        ("train/00000001.tokens", _cut, "size: .*31 bytes instead of 32"),
        ("train/00000001.tokens", pathlib.Path.unlink, "missing: .*tokens is missing"),
        ("train/00000000.documents", _flip_a_bit, "digest: .*documents does not match"),
        ("tokenizer.json", _flip_a_bit, "digest: .*is not the tokenizer of this dataset"),
        ("tokenizer.json", pathlib.Path.unlink, "missing: .*tokenizer.json is missing"),
    ],
)
def test_damage_is_named(
    storage: LocalStorage, name: str, damage: Callable[[pathlib.Path], None], message: str
) -> None:
    damage(storage.path(name))
    (finding,) = _findings(storage)
    assert re.match(message, finding), finding


def test_what_the_manifest_does_not_know_is_named(storage: LocalStorage) -> None:
    storage.write("train/00000099.tokens", b"")
    (finding,) = _findings(storage)
    assert "train/00000099.tokens is not in the manifest; remove it" in finding


def _with(storage: LocalStorage, **changes: object) -> DatasetManifest:
    manifest = msgspec.structs.replace(read_manifest(storage), **changes)
    storage.write(MANIFEST, encode_manifest(manifest))
    return manifest


@pytest.mark.parametrize("vocab_size", [5, END_OF_DOCUMENT])
def test_tokens_beyond_the_vocabulary_are_named(storage: LocalStorage, vocab_size: int) -> None:
    """The last token of a vocabulary is its size less one."""
    _with(storage, vocab_size=vocab_size)
    assert all("vocabulary: " in finding for finding in _findings(storage))
    assert len(_findings(storage)) == read_manifest(storage).num_shards("train")


@pytest.mark.parametrize("wrong", ["repeated", "descending", "beyond"])
def test_documents_that_end_before_they_begin_are_named(storage: LocalStorage, wrong: str) -> None:
    """Their digest fits: they were wrong when they were written."""
    name = documents_name("train", 0)
    ends = np.frombuffer(storage.read(name), DOCUMENT_END_DTYPE).copy()
    assert len(ends) > 2
    if wrong == "repeated":
        ends[1] = ends[0]
    elif wrong == "descending":
        ends[:2] = ends[1::-1]
    else:
        ends[-1] = 17  # Of 16 tokens.
    storage.write(name, ends.tobytes())
    manifest = read_manifest(storage)
    split = manifest.splits["train"]
    first, *others = split.shard_entries()
    digest = blake3.blake3(ends.tobytes()).hexdigest()
    first = msgspec.structs.replace(first, documents_blake3=digest)
    shards = msgspec.Raw(msgspec.json.encode([first, *others]))
    _with(storage, splits={"train": msgspec.structs.replace(split, shards=shards)})
    (finding,) = _findings(storage)
    assert "00000000.documents has documents that end before they begin" in finding


@pytest.mark.parametrize("field", ["num_tokens", "num_documents"])
@pytest.mark.parametrize("change", [-1, 1, 1000])
def test_a_split_that_counts_otherwise_than_its_shards_is_named(
    storage: LocalStorage, field: str, change: int
) -> None:
    split = read_manifest(storage).splits["train"]
    other = msgspec.structs.replace(split, **{field: getattr(split, field) + change})
    _with(storage, splits={"train": other})
    (finding,) = _findings(storage)
    assert "other numbers for the split train than for its shards together" in finding


def test_documents_of_a_shard_that_is_not_there_are_an_error_of_one_line(
    storage: LocalStorage,
) -> None:
    manifest = read_manifest(storage)
    for shard in (1, 0):
        (pathlib.Path(storage.url) / documents_name("train", shard)).unlink()
        with pytest.raises(DataError, match=rf"0000000{shard}\.documents is missing; prepare"):
            document_lengths(storage, manifest, "train")
    with pytest.raises(DataError, match=r"00000000\.documents is missing"):
        list(document_beginnings(storage, manifest, "train", 1, 1))


@pytest.mark.parametrize("part_bytes", [2, 6, 2**24])
def test_documents_that_nothing_ends_are_named(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(verify_module, "_PART_BYTES", part_bytes)
    num_documents = len(storage.read(documents_name("train", 0))) // 4
    _with(storage, end_of_document=200)
    first = _findings(storage)[0]
    assert f"has {num_documents} documents without the token that ends them" in first


def test_a_shard_is_read_in_parts(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_PART_BYTES", 6)
    lengths = []
    read_range = storage.read_range

    def noted(name: str, start: int, end: int) -> bytes:
        lengths.append(end - start)
        return read_range(name, start, end)

    monkeypatch.setattr(storage, "read_range", noted)
    assert not _findings(storage)
    assert max(lengths) == 6


@settings(deadline=None)  # Writing files is slow on a busy machine.
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30), shard=st.integers(1, 50))
def test_every_document_counts_once(
    tmp_path_factory: "object", lengths: list[int], shard: int
) -> None:
    directory = tmp_path_factory.mktemp("dataset")  # type: ignore[attr-defined]
    write_dataset(directory, [np.ones(length) for length in lengths], shard_tokens=shard)
    storage = LocalStorage(directory)
    found = document_lengths(storage, read_manifest(storage), "train")
    # Each document is followed by its end token.
    expected = collections.Counter((length + 1).bit_length() - 1 for length in lengths)
    assert {place: count for place, count in enumerate(found.counts) if count} == dict(expected)
    assert found.num_documents == len(lengths)
    assert found.num_tokens == sum(lengths) + len(lengths)
    assert found.longest == max(lengths) + 1
    assert len(found.counts) == (max(lengths) + 1).bit_length()


def test_beginnings_are_spread_over_the_documents(tmp_path: pathlib.Path) -> None:
    write_dataset(tmp_path, [np.full(9, number) for number in range(11)], shard_tokens=200)
    storage = LocalStorage(tmp_path)
    manifest = read_manifest(storage)
    shown = [each.tolist() for each in document_beginnings(storage, manifest, "train", 3, 4)]
    assert shown == [[0] * 4, [5] * 4, [10] * 4]
    whole = document_beginnings(storage, manifest, "train", 1, 99)
    assert [each.tolist() for each in whole] == [[0] * 9]
    assert len(list(document_beginnings(storage, manifest, "train", 99, 4))) == 11


def test_a_shard_in_which_nothing_ends_has_no_beginnings(tmp_path: pathlib.Path) -> None:
    write_dataset(tmp_path, [np.ones(100)], shard_tokens=50)
    storage = LocalStorage(tmp_path)
    assert list(document_beginnings(storage, read_manifest(storage), "train", 3, 4)) == []
