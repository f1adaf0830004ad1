"""Tests of the pieces of source files, and of training a tokenizer on a sample of them."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable

import pyarrow
import pyarrow.parquet
import pytest

from paceline.core.errors import DataError, UsageError
from paceline.core.units import GIB, KIB, MIB, TB
from paceline.data.documents import ReadOptions
from paceline.data.prepare import tokenize
from paceline.data.prepare.config import TokenizerConfig
from paceline.data.prepare.tokenize import plan_pieces, train_tokenizer
from paceline.data.source_files import Compression, FoundFile, Kind, find_files
from paceline.data.tokenizer import load_tokenizer, train_bpe
from tests.unit.data.corpus import make_documents, write_jsonl

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


@pytest.fixture
def config(tmp_path: pathlib.Path) -> TokenizerConfig:
    for number in range(4):
        write_jsonl(tmp_path / "corpus" / f"{number}.jsonl", make_documents(50, seed=number))
    return TokenizerConfig(
        sources=(str(tmp_path / "corpus"),),
        out=str(tmp_path / "made" / "tokenizer.json"),
        vocab_size=300,
    )


def test_all_documents_are_trained_on(config: TokenizerConfig) -> None:
    seen: list[tuple[int, int]] = []
    tokenizer = train_tokenizer(config, lambda done, total: seen.append((done, total)))
    documents = [text for number in range(4) for text in make_documents(50, seed=number)]
    assert tokenizer.json == train_bpe(documents, 300)
    assert load_tokenizer(config.out).json == tokenizer.json
    assert seen[-1][0] == seen[-1][1] > 10_000


def test_a_sample_comes_from_everywhere(
    config: TokenizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "SMALLEST_PIECE_BYTES", 500)
    trained_on: list[str] = []

    def listen(documents: Iterable[str], vocab_size: int) -> str:
        trained_on.extend(documents)
        return train_bpe(trained_on, vocab_size)

    monkeypatch.setattr(tokenize, "train_bpe", listen)
    train_tokenizer(dataclasses.replace(config, sample_bytes=5000))
    assert 4000 < sum(map(len, trained_on)) < 7000
    assert {text[0] for text in trained_on} == set("0123")


def test_what_cannot_be_trained_on_is_named(config: TokenizerConfig) -> None:
    with pytest.raises(DataError, match=r"corpus: no documents to train on; check --field"):
        train_tokenizer(dataclasses.replace(config, field="body"))
    assert not pathlib.Path(config.out).exists()
    with pytest.raises(UsageError, match="is a directory"):
        train_tokenizer(dataclasses.replace(config, out=config.sources[0]))
