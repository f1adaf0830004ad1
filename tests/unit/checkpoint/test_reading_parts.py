"""Tests that any part of a tensor is read exactly, and that each byte is read and verified once."""

import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from paceline.checkpoint.catalog import open_checkpoint, verify_checkpoint
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.dcp import JsonLoadPlanner
from paceline.checkpoint.dcp_writer import PendingSave
from paceline.checkpoint.errors import DamagedCheckpointError
from paceline.checkpoint.format import Manifest
from paceline.checkpoint.restore import CheckpointReader
from paceline.checkpoint.storage import DirectoryStorage
from paceline.data.storage import LocalStorage
from tests.unit.checkpoint.runs import save_steps

_BLOCK_BYTES = 24
_ROWS, _COLUMNS = 7, 5

Read = tuple[str, int, int]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def pending(**options: Any) -> PendingSave:
        return PendingSave(block_bytes=_BLOCK_BYTES, **options)

    monkeypatch.setattr("paceline.checkpoint.checkpointer.PendingSave", pending)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """Returns the ranges of files that are read from now on."""
    found: list[Read] = []
    original = LocalStorage.read_range

    def read_range(storage: LocalStorage, name: str, start: int, end: int) -> bytes:
        found.append((name, start, end))
        return original(storage, name, start, end)

    monkeypatch.setattr(LocalStorage, "read_range", read_range)
    return found


def _matrix() -> torch.Tensor:
    return torch.arange(_ROWS * _COLUMNS, dtype=torch.float32).view(_ROWS, _COLUMNS)


def _save(place: pathlib.Path, state: dict[str, Any], **options: Any) -> None:
    with Checkpointer(place, asynchronous=False, **options) as checkpointer:
        checkpointer.save(1, state, None)


class Part(JsonLoadPlanner):
    """Gives the room for one item."""

    def __init__(self, room: torch.Tensor) -> None:
        super().__init__()
        self.room = room
        self.num_committed = 0

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.room

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.num_committed += 1


def _item(name: str, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> ReadItem:
    index = MetadataIndex(name, [0] * len(offsets))
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=torch.Size([0] * len(offsets)),
        storage_index=index,
        storage_offsets=torch.Size(offsets),
        lengths=torch.Size(lengths),
    )


def _read(
    reader: CheckpointReader, name: str, offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> torch.Tensor:
    planner = Part(torch.full(lengths, -1.0))
    reader.read_data(LoadPlan([_item(name, offsets, lengths)]), planner).wait()
    assert planner.num_committed == 1
    return planner.room


def _boxes() -> Iterator[tuple[range, range]]:
    for first, last in itertools.combinations(range(_ROWS + 1), 2):
        for left, right in itertools.combinations(range(_COLUMNS + 1), 2):
            yield range(first, last), range(left, right)


def _chunk(manifest: Manifest, name: str) -> tuple[int, int, list[str]]:
    (chunk,) = manifest.tensors[name].chunks
    return chunk.file, chunk.start, chunk.blake3


def test_every_box_of_a_matrix_is_read_from_the_blocks_that_contain_its_rows(
    tmp_path: pathlib.Path, small_blocks: None, reads: list[Read]
) -> None:
    _save(tmp_path, {"x": _matrix()})
    checkpoint = open_checkpoint(DirectoryStorage(tmp_path), 1)
    file, start, digests = _chunk(checkpoint.manifest, "x")
    num_bytes = _ROWS * _COLUMNS * 4
    assert len(digests) == 6
    reader = CheckpointReader(checkpoint)
    for rows, columns in _boxes():
        reads.clear()
        found = _read(reader, "x", (rows.start, columns.start), (len(rows), len(columns)))
        expected = _matrix()[rows.start : rows.stop, columns.start : columns.stop]
        assert torch.equal(found, expected), (rows, columns)
        first = rows.start * _COLUMNS * 4 // _BLOCK_BYTES
        last = (rows.stop * _COLUMNS * 4 - 1) // _BLOCK_BYTES
        assert reads == [
            (
                checkpoint.manifest.files[file].name,
                start + block * _BLOCK_BYTES,
                start + min((block + 1) * _BLOCK_BYTES, num_bytes),
            )
            for block in range(first, last + 1)
        ]


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(3.0), torch.arange(11.0), torch.zeros(0, 3), torch.zeros(3, 0)],
    ids=["scalar", "vector", "no rows", "no columns"],
)
def test_scalars_vectors_and_empty_tensors_are_read(
    tmp_path: pathlib.Path, small_blocks: None, tensor: torch.Tensor
) -> None:
    _save(tmp_path, {"x": tensor, "y": _matrix()})
    reader = CheckpointReader(open_checkpoint(DirectoryStorage(tmp_path), 1))
    found = _read(reader, "x", (0,) * tensor.dim(), tuple(tensor.shape))
    assert torch.equal(found, tensor)
    reader.verify_rest()


def test_what_was_read_is_not_read_again_and_the_rest_once(
    tmp_path: pathlib.Path, small_blocks: None, reads: list[Read]
) -> None:
    _save(tmp_path, {"x": _matrix(), "y": _matrix() + 1})
    checkpoint = open_checkpoint(DirectoryStorage(tmp_path), 1)
    reader = CheckpointReader(checkpoint)
    _read(reader, "y", (2, 0), (3, _COLUMNS))  # Bytes 40 to 100: blocks 1 to 4.
    assert len(reads) == 4
    reader.verify_rest()
    assert len(reads) == len(set(reads))
    (file,) = checkpoint.manifest.files
    end = 0
    for name, start, stop in sorted(reads):
        assert (name, start) == (file.name, end)
        end = stop
    assert end == file.num_bytes


def test_items_are_read_front_to_back(
    tmp_path: pathlib.Path, small_blocks: None, reads: list[Read]
) -> None:
    names = ["c", "a", "b"]
    _save(tmp_path, {name: _matrix() for name in names}, max_file_bytes=300)
    reader = CheckpointReader(open_checkpoint(DirectoryStorage(tmp_path), 1))
    whole = (_ROWS, _COLUMNS)
    plan = LoadPlan([_item(name, (0, 0), whole) for name in names])
    reader.read_data(plan, Part(torch.zeros(whole))).wait()
    assert len({name for name, _, _ in reads}) == 2
    assert reads == sorted(reads)


@pytest.mark.parametrize("at", ["header", "first", "last"])
def test_damage_outside_of_what_was_read_is_found(
    tmp_path: pathlib.Path, small_blocks: None, at: str
) -> None:
    _save(tmp_path, {"x": _matrix(), "y": _matrix()})
    checkpoint = open_checkpoint(DirectoryStorage(tmp_path), 1)
    (file,) = checkpoint.manifest.files
    path = tmp_path / "step-00000001" / file.name
    content = bytearray(path.read_bytes())
    content[{"header": 9, "first": file.header_bytes, "last": -1}[at]] ^= 1
    path.write_bytes(content)
    reader = CheckpointReader(checkpoint)
    _read(reader, "x", (3, 0), (1, _COLUMNS))
    with pytest.raises(DamagedCheckpointError, match=r"rank 0: .*rank-00000-00000\.safetensors"):
        reader.verify_rest()


def _verified(place: pathlib.Path) -> tuple[list[str], list[tuple[int, int]]]:
    progress: list[tuple[int, int]] = []
    findings = verify_checkpoint(place, 1, lambda done, total: progress.append((done, total)))
    return [finding.name for finding in findings], progress


def test_verifying_reads_each_byte_of_an_intact_checkpoint_once_in_parts(
    tmp_path: pathlib.Path, reads: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, [1], max_file_bytes=400)
    monkeypatch.setattr("paceline.checkpoint.catalog._PART_BYTES", 100)
    files = open_checkpoint(DirectoryStorage(tmp_path), 1).manifest.files
    assert len(files) > 2
    assert _verified(tmp_path)[0] == []
    assert reads == [
        (file.name, start, min(start + 100, file.num_bytes))
        for file in files
        for start in range(0, file.num_bytes, 100)
    ]


def _shorten(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "names"), [(None, []), (_shorten, ["size"]), (_flip, ["digest"])]
)
def test_verifying_tells_its_progress_in_bytes_up_to_the_total(
    tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None] | None, names: list[str]
) -> None:
    save_steps(tmp_path, [1], max_file_bytes=400)
    manifest = open_checkpoint(DirectoryStorage(tmp_path), 1).manifest
    if damage is not None:
        damage(tmp_path / "step-00000001" / manifest.files[1].name)
    found, progress = _verified(tmp_path)
    assert found == names
    sizes = itertools.accumulate(file.num_bytes for file in manifest.files)
    assert progress == [(size, manifest.num_bytes) for size in sizes]
    assert progress[-1][0] == manifest.num_bytes
