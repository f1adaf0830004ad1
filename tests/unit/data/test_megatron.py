"""Tests of Megatron's files: the documented layout, round trips and damaged files."""

import pathlib
import struct

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data.megatron import MegatronDataset, write_megatron
from paceline.data.prepare.run import prepare
from paceline.data.storage import open_storage
from tests.unit.data.corpus import config_of, dataset_bytes, stored_documents, write_corpus


def _write_by_hand(prefix: pathlib.Path, code: int, tokens: list[int], letter: str) -> None:
    """Writes three documents of two, one and no sequences, byte by byte."""
    size = struct.calcsize(letter)
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, 3, 4)
        + struct.pack("<3i", 2, 1, 3)
        + struct.pack("<3q", 0, 2 * size, 3 * size)
        + struct.pack("<4q", 0, 2, 3, 3)
    )


@pytest.mark.parametrize(
    ("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")]
)
def test_the_documented_layout_is_read(tmp_path: pathlib.Path, code: int, letter: str) -> None:
    prefix = tmp_path / "data"
    _write_by_hand(prefix, code, [7, 8, 9, 10, 11, 12], letter)
    dataset = MegatronDataset(tmp_path / "data.idx")
    assert [dataset.document(each).tolist() for each in range(len(dataset))] == [
        [7, 8, 9],
        [10, 11, 12],
        [],
    ]
    assert dataset.num_tokens() == 6


def test_a_dataset_goes_there_and_back(tmp_path: pathlib.Path) -> None:
    write_corpus(tmp_path / "corpus")
    out = tmp_path / "out"
    manifest = prepare(config_of(tmp_path / "corpus", out))
    for split in ("train", "heldout"):
        write_megatron(open_storage(out), manifest, split, tmp_path / "megatron" / split)
        dataset = MegatronDataset(tmp_path / "megatron" / f"{split}.idx")
        expected = stored_documents(out, manifest, split)
        assert len(dataset) == len(expected) > 0
        assert all(map(np.array_equal, map(dataset.document, range(len(dataset))), expected))
    again = tmp_path / "again"
    config = config_of(tmp_path / "megatron" / "train.idx", again, heldout=0.0)
    made = prepare(config)
    assert all(
        map(
            np.array_equal,
            stored_documents(again, made, "train"),
            stored_documents(out, manifest, "train"),
        )
    )
    assert (
        dataset_bytes(again)["train/00000000.tokens"] == dataset_bytes(out)["train/00000000.tokens"]
    )


def test_tokens_are_ended_once_and_must_be_in_the_vocabulary(tmp_path: pathlib.Path) -> None:
    _write_by_hand(tmp_path / "data", 8, [7, 8, 255, 10, 11, 12], "H")
    config = config_of(tmp_path / "data.idx", tmp_path / "out", heldout=0.0)
    manifest = prepare(config)
    stored = [each.tolist() for each in stored_documents(tmp_path / "out", manifest, "train")]
    assert stored == [[7, 8, 255], [10, 11, 12, 255]]
    assert manifest.dropped["empty"].examples == [f"{tmp_path}/data.idx:document 2"]
    _write_by_hand(tmp_path / "data", 8, [7, 8, 9, 10, 256, 12], "H")
    with pytest.raises(DataError, match=r"data.idx:document 1: token 256 .* 256"):
        prepare(config_of(tmp_path / "data.idx", tmp_path / "other"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"MMIDIDX\x00\x00" + bytes(10), "truncated"),
        (b"XXXXXXX\x00\x00" + struct.pack("<QBQQ", 1, 8, 0, 0), "not a Megatron index"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 2, 8, 0, 0), "not a Megatron index"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 7, 0, 0), "not a Megatron index"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 10**9, 1), "truncated"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQqq", 1, 8, 0, 2, 1, 0), "do not cover"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQqqq", 1, 8, 0, 3, 0, 9, 0), "do not cover"),
    ],
)
def test_other_files_are_named(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    (tmp_path / "data.idx").write_bytes(content)
    (tmp_path / "data.bin").write_bytes(b"")
    with pytest.raises(DataError, match=rf"data\.idx: .*{message}"):
        MegatronDataset(tmp_path / "data.idx")


def test_a_truncated_bin_is_named(tmp_path: pathlib.Path) -> None:
    _write_by_hand(tmp_path / "data", 8, [7, 8, 9, 10, 11], "H")
    dataset = MegatronDataset(tmp_path / "data.idx")
    with pytest.raises(DataError, match=r"sequence 2 is at bytes 6 to 12 of a \.bin of 10"):
        dataset.document(1)
    (tmp_path / "data.bin").unlink()
    with pytest.raises(DataError, match=r"data\.bin.*data\.idx needs it"):
        MegatronDataset(tmp_path / "data.idx")
