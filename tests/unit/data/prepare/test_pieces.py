"""Tests that pieces cover every file of any size once, and that their number is bounded."""

import itertools
import pathlib

import pyarrow
import pyarrow.parquet
import pytest

from paceline.core.units import GIB, KIB, MIB, TB
from paceline.data.prepare import tokenize
from paceline.data.prepare.tokenize import plan_pieces
from paceline.data.sources.files import Compression, FoundFile, Kind, find_files
from paceline.data.sources.read import ReadOptions
from tests.unit.data.corpus import make_documents

READING = ReadOptions(separator=b"<|endoftext|>", field="text", max_document_bytes=MIB)


def _file(
    num_bytes: int, kind: Kind = "jsonl", compression: Compression | None = None, name: str = "a"
) -> FoundFile:
    return FoundFile(
        name=name,
        path=f"/{name}",
        num_bytes=num_bytes,
        modified_ns=0,
        kind=kind,
        compression=compression,
    )


def test_large_files_are_cut_and_small_ones_go_together() -> None:
    files = [_file(5 * MIB + 1, "text"), *(_file(300 * KIB, name=f"b{i}") for i in range(8))]
    planned = plan_pieces(files, READING)
    spans = [span for piece in planned for span in piece.spans]
    assert [span.file for span in spans] == [files[0]] * 6 + files[1:]
    large = spans[:6]
    assert [span.start for span in large] == [each * MIB for each in range(6)]
    assert all(a.end == b.start for a, b in itertools.pairwise(large))
    assert large[-1].end == 5 * MIB + 1
    assert all(piece.num_bytes >= MIB for piece in planned[:-1])
    assert planned[5].label == "a from 5242880 and 4 more files"


@pytest.mark.parametrize(
    ("file", "separator"),
    [
        (_file(9 * MIB, "jsonl", "gzip"), b"x"),
        (_file(9 * MIB, "text"), b"\n\n"),
        (_file(9 * MIB, "text"), b""),
    ],
)
def test_what_cannot_be_cut_is_one_span(file: FoundFile, separator: bytes) -> None:
    reading = ReadOptions(separator=separator, field="text", max_document_bytes=MIB)
    ((span,),) = (piece.spans for piece in plan_pieces([file], reading))
    assert (span.start, span.end, span.num_bytes) == (0, None, 9 * MIB)


@pytest.mark.parametrize(
    ("total_bytes", "piece_bytes"),
    [(10 * MIB, MIB), (GIB, MIB), (5 * GIB, 8 * MIB), (300 * GIB, 8 * MIB), (40 * TB, GIB)],
)
def test_pieces_grow_with_the_corpus(total_bytes: int, piece_bytes: int) -> None:
    planned = plan_pieces([_file(total_bytes)], READING)
    assert planned[0].num_bytes == piece_bytes
    assert len(planned) == -(-total_bytes // piece_bytes) <= 2**16


def test_a_million_tiny_files_make_few_pieces() -> None:
    planned = plan_pieces([_file(10)] * 10_000, READING)
    assert [len(piece.spans) for piece in planned] == [4096, 4096, 1808]


def test_parquet_is_cut_between_row_groups(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "SMALLEST_PIECE_BYTES", 1000)
    table = pyarrow.table({"text": make_documents(60)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    planned = plan_pieces(find_files([str(tmp_path)]).files, READING)
    spans = [span for piece in planned for span in piece.spans]
    assert len(spans) > 2
    assert [spans[0].start, spans[-1].end] == [0, 12]
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))
