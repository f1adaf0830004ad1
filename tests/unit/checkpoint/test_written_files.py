"""Tests that a manifest describes its files to the byte, and how host memory is used again."""

import json
import pathlib
from typing import Any

import blake3
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from paceline.checkpoint.catalog import open_checkpoint
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.dcp_writer import HostBuffers, PendingSave
from paceline.checkpoint.format import ITEM_BYTES, Manifest, Piece, encode_header, split_into_files
from paceline.checkpoint.storage import DirectoryStorage
from paceline.parallel.zero.optimizer_checkpoint import FlatPiece
from tests.unit.checkpoint.ranks import checkpoint_ranks

_BLOCK_BYTES = 40


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def pending(**options: Any) -> PendingSave:
        return PendingSave(block_bytes=_BLOCK_BYTES, **options)

    monkeypatch.setattr("paceline.checkpoint.checkpointer.PendingSave", pending)


def _digest(content: bytes) -> str:
    return blake3.blake3(content).hexdigest()


def _require_described(place: pathlib.Path, manifest: Manifest) -> None:
    """Requires that files, their headers, chunks and blocks are where the manifest says."""
    contents = [(place / file.name).read_bytes() for file in manifest.files]
    for number, (file, content) in enumerate(zip(manifest.files, contents, strict=True)):
        assert file.num_bytes == len(content)
        assert file.blake3 == _digest(content)
        assert file.header_blake3 == _digest(content[: file.header_bytes])
        assert file.header_bytes == 8 + int.from_bytes(content[:8], "little")
        assert file.header_bytes % 8 == 0
        header = json.loads(content[8 : file.header_bytes])
        assert header.pop("__metadata__") == {"format": "pt"}
        found = {
            (chunk.start - file.header_bytes, tuple(chunk.shape))
            for tensor in manifest.tensors.values()
            for chunk in tensor.chunks
            if chunk.file == number
        }
        assert found == {
            (entry["data_offsets"][0], tuple(entry["shape"])) for entry in header.values()
        }
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            num_bytes = ITEM_BYTES[tensor.dtype] * torch.Size(chunk.shape).numel()
            content = contents[chunk.file][chunk.start : chunk.start + num_bytes]
            assert len(content) == num_bytes
            assert chunk.blake3 == [
                _digest(content[start : start + _BLOCK_BYTES])
                for start in range(0, num_bytes, _BLOCK_BYTES)
            ]


def test_the_manifest_describes_its_files_to_the_byte(
    tmp_path: pathlib.Path, small_blocks: None
) -> None:
    state = {
        "wide": torch.arange(30.0, dtype=torch.float64),
        "narrow": torch.arange(9, dtype=torch.uint8),
        "matrix": torch.arange(21.0).view(3, 7).T,
        "scalar": torch.tensor(2.0),
        "value": {"a": 1},
    }
    with Checkpointer(tmp_path, asynchronous=False, max_file_bytes=90) as checkpointer:
        checkpointer.save(1, state, {"run": "a"}, {"rank": 0})
    manifest = open_checkpoint(DirectoryStorage(tmp_path), 1).manifest
    assert [file.name for file in manifest.files] == [
        f"rank-00000-{number:05d}.safetensors" for number in range(3)
    ]
    assert (manifest.step, manifest.world_size, manifest.block_bytes) == (1, 1, _BLOCK_BYTES)
    assert {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()} == {
        "wide": ("F64", [30]),
        "narrow": ("U8", [9]),
        "matrix": ("F32", [7, 3]),
        "scalar": ("F32", []),
    }
    assert {name: json.loads(bytes(value)) for name, value in manifest.values.items()} == {
        "value.a": 1
    }
    _require_described(tmp_path / "step-00000001", manifest)


def test_each_rank_writes_its_own_files_and_the_first_describes_them_all(
    tmp_path: pathlib.Path, small_blocks: None
) -> None:
    with checkpoint_ranks(3) as ranks:

        def program(rank: int) -> None:
            checkpointer = Checkpointer(tmp_path, asynchronous=False)
            mine = torch.arange(20.0) + 100 * rank
            state = {"x": FlatPiece.of(mine, 20 * rank, 60), "same": torch.ones(6)}
            checkpointer.save(2, state, {"of": rank}, {"rank": rank})
            checkpointer.close()

        ranks.run(program)
    manifest = open_checkpoint(DirectoryStorage(tmp_path), 2).manifest
    names = [f"rank-{rank:05d}-00000.safetensors" for rank in range(3)]
    assert sorted(file.name for file in manifest.files) == names
    assert sorted(file.rank for file in manifest.files) == [0, 1, 2]
    assert all(file.name == names[file.rank] for file in manifest.files)
    assert json.loads(bytes(manifest.identity)) == {"of": 0}
    assert [json.loads(bytes(one)) for one in manifest.ranks] == [{"rank": n} for n in range(3)]
    assert manifest.world_size == 3
    assert len(manifest.tensors["same"].chunks) == 1  # Only one rank writes what all have.
    for chunk in manifest.tensors["x"].chunks:
        assert chunk.offsets == [20 * manifest.files[chunk.file].rank]
    _require_described(tmp_path / "step-00000002", manifest)


def _piece(name: str, shape: tuple[int, ...], *, offset: int = 0, rows: int | None = None) -> Piece:
    return Piece(
        name=name,
        dtype="F32",
        offsets=(offset, *(0 for _ in shape[1:])),
        shape=shape,
        full_shape=shape if rows is None else (rows, *shape[1:]),
    )


def test_a_part_of_a_tensor_has_its_ranges_in_its_name() -> None:
    assert _piece("x", (3, 4)).label == "x"
    assert _piece("x", (3, 4), offset=2, rows=8).label == "x[2:5,0:4]"


def test_a_file_is_as_full_as_it_may_be_and_a_larger_piece_is_alone() -> None:
    small, half, large = _piece("small", (1,)), _piece("half", (5,)), _piece("large", (11,))
    assert [[piece.name for piece in one] for one in split_into_files([half, half, small], 40)] == [
        ["half", "half"],
        ["small"],
    ]
    assert [
        [piece.name for piece in one] for one in split_into_files([small, large, small], 40)
    ] == [["small"], ["large"], ["small"]]
    assert split_into_files([], 40) == []


@pytest.mark.parametrize("length", range(1, 20))
def test_the_bytes_after_a_header_are_aligned(length: int) -> None:
    header = encode_header([_piece("x" * length, (2,))])
    assert len(header) % 8 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    text = header[8:]
    assert len(text) - len(text.rstrip(b" ")) < 8
    assert json.loads(text)["x" * length]["data_offsets"] == [0, 8]


def _copied(buffers: HostBuffers, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    copies = buffers.copy({MetadataIndex(name, [0]): each for name, each in tensors.items()})
    return {index.fqn: copy for index, copy in copies.items()}


def test_host_memory_is_allocated_once_and_used_by_every_save() -> None:
    buffers = HostBuffers()
    first = _copied(buffers, x=torch.arange(6.0), y=torch.ones(2))
    again = _copied(buffers, x=torch.arange(6.0) + 1, y=torch.zeros(2))
    assert again["x"] is first["x"]
    assert again["y"] is first["y"]
    assert torch.equal(again["x"], torch.arange(6.0) + 1)
    assert torch.equal(again["y"], torch.zeros(2))
    _copied(buffers, x=torch.arange(6.0))
    assert _copied(buffers, y=torch.ones(2))["y"] is not first["y"]  # No longer part of a save.


@pytest.mark.parametrize(
    "other", [torch.arange(7.0), torch.arange(6.0).view(2, 3), torch.arange(6, dtype=torch.int32)]
)
def test_a_tensor_of_another_shape_or_dtype_gets_other_memory(other: torch.Tensor) -> None:
    buffers = HostBuffers()
    before = _copied(buffers, x=torch.arange(6.0))["x"]
    copy = _copied(buffers, x=other)["x"]
    assert copy is not before
    assert copy.dtype == other.dtype
    assert torch.equal(copy, other)
    assert torch.equal(before, torch.arange(6.0))


def test_copies_are_contiguous_and_apart_from_the_state() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    copy = _copied(HostBuffers(), x=matrix.T)["x"]
    assert copy.is_contiguous()
    matrix.zero_()
    assert copy.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
