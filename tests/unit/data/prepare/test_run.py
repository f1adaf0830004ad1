"""Tests that a prepared dataset has what its sources have, for any workers and interruptions."""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from paceline.core.errors import DataError, UsageError
from paceline.data.manifest import read_manifest
from paceline.data.prepare import duplicates, tokenize
from paceline.data.prepare import run as preparation
from paceline.data.prepare import tokenize as pieces
from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.run import find_inputs, find_prepared, make_job, prepare
from paceline.data.storage import open_storage
from paceline.data.tokenizer import train_bpe
from tests.unit.data.corpus import (
    config_of,
    dataset_bytes,
    make_documents,
    stored_texts,
    write_corpus,
    write_jsonl,
)
from tests.unit.data.s3_server import s3_server


@pytest.fixture
def corpus(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Writes a corpus of many pieces; returns its directory."""
    monkeypatch.setattr(pieces, "SMALLEST_PIECE_BYTES", 4000)
    write_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


def test_documents_keep_their_order_and_duplicates_go(
    corpus: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    expected = write_corpus(corpus)
    manifest = prepare(config_of(corpus, tmp_path / "out"))
    train = stored_texts(tmp_path / "out", manifest, "train")
    heldout = stored_texts(tmp_path / "out", manifest, "heldout")
    assert len(heldout) > 10
    assert train == [each for each in expected if each not in set(heldout)]
    assert heldout == [each for each in expected if each not in set(train)]
    dropped = manifest.dropped["duplicate"]
    assert dropped.num_documents == 4
    names = [pathlib.Path(each.partition(":")[0]).name for each in dropped.examples]
    assert names == ["b.txt", *["c.ndjson"] * 3]
    assert manifest.num_source_bytes == sum(len(each.encode()) for each in expected)
    assert read_manifest(open_storage(tmp_path / "out")) == manifest


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_do_not_matter(corpus: pathlib.Path, tmp_path: pathlib.Path, workers: int) -> None:
    prepare(config_of(corpus, tmp_path / "one"))
    prepare(config_of(corpus, tmp_path / "more", workers=workers))
    assert dataset_bytes(tmp_path / "one") == dataset_bytes(tmp_path / "more")


def test_pieces_and_blocks_do_not_matter(
    corpus: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prepare(config_of(corpus, tmp_path / "a"))
    monkeypatch.setattr(pieces, "SMALLEST_PIECE_BYTES", 10**6)
    monkeypatch.setattr(tokenize, "BLOCK_TOKENS", 700)
    monkeypatch.setattr(tokenize, "_BATCH_DOCUMENTS", 3)
    manifest = prepare(config_of(corpus, tmp_path / "b"))
    assert dataset_bytes(tmp_path / "a") == dataset_bytes(tmp_path / "b")
    assert manifest == expected


def test_partitions_and_groups_do_not_matter(
    corpus: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config_of(corpus, tmp_path / "a"))
    monkeypatch.setattr(duplicates, "_PARTITION_DOCUMENTS", 40)
    monkeypatch.setattr(duplicates, "GROUP_BLOCKS", 3)
    prepare(config_of(corpus, tmp_path / "b"))
    assert dataset_bytes(tmp_path / "a") == dataset_bytes(tmp_path / "b")


def test_a_trained_tokenizer_travels_with_the_shards(
    corpus: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(make_documents(100), 300))
    config = config_of(corpus, tmp_path / "out", tokenizer=str(path))
    manifest = prepare(config)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == path.read_text()
    assert manifest.vocab_size == 300
    assert manifest.num_source_bytes > 1.5 * manifest.splits["train"].num_tokens


def test_a_prefix_of_s3_holds_the_same_bytes(corpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    prepare(config_of(corpus, tmp_path / "local"))
    with s3_server() as bucket:
        config = config_of(corpus, f"{bucket}/somewhere/below")
        manifest = prepare(config)
        storage = open_storage(config.out)
        stored = {name: storage.read(name) for name in storage.sizes()}
        assert find_prepared(config) == manifest
    assert stored == dataset_bytes(tmp_path / "local")


def test_files_that_are_added_move_no_document(
    corpus: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    before = prepare(config_of(corpus, tmp_path / "a"))
    write_jsonl(corpus / "added.jsonl", make_documents(50, seed=9))
    after = prepare(config_of(corpus, tmp_path / "b"))
    for split in ("train", "heldout"):
        old = stored_texts(tmp_path / "a", before, split)
        new = stored_texts(tmp_path / "b", after, split)
        assert [each for each in new if not each.startswith("9.")] == old
        assert len(new) > len(old)


def test_a_finished_dataset_is_left_alone(corpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    config = config_of(corpus, out)
    assert find_prepared(config) is None
    manifest = prepare(config)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    (out / "_work" / "pieces").mkdir(parents=True)  # As if killed at the very end.
    assert prepare(config) == find_prepared(config) == manifest
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout": 0.2}, "--heldout was 0.1 and is 0.2"),
        ({"shard_tokens": 6000}, "--shard-tokens was 5000"),
        ({"field": "body"}, "--field was 'text'"),
        ({"end_of_document": "a"}, "--end-of-document was 255"),
    ],
)
def test_other_options_are_refused_by_name(
    corpus: pathlib.Path, tmp_path: pathlib.Path, changes: dict[str, object], message: str
) -> None:
    config = config_of(corpus, tmp_path / "out")
    prepare(config)
    with pytest.raises(UsageError, match=message):
        prepare(dataclasses.replace(config, **changes))


@pytest.mark.parametrize("find", [find_prepared, prepare])
def test_what_a_command_left_that_was_killed_at_the_end_goes(
    corpus: pathlib.Path, tmp_path: pathlib.Path, find: Callable[[PrepareConfig], object]
) -> None:
    config = config_of(corpus, tmp_path / "out")
    prepare(config)
    (tmp_path / "out" / "_work" / "pieces").mkdir(parents=True)
    (tmp_path / "out" / "_work" / "pieces" / "finished.json").write_text("{}")
    assert find(config) is not None
    assert not (tmp_path / "out" / "_work").exists()


def test_what_the_owner_before_left_goes(
    corpus: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(corpus, tmp_path / "out")
    prepare(config)
    (tmp_path / "out" / "_work").mkdir()
    known = preparation.find_finished
    answers = [lambda *_arguments: None, known]  # It ends while this command waits its turn.
    monkeypatch.setattr(preparation, "find_finished", lambda *arguments: answers.pop(0)(*arguments))
    prepare(config)
    assert not answers
    assert not (tmp_path / "out" / "_work").exists()


def test_other_sources_are_refused_by_name(corpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = config_of(corpus, tmp_path / "out")
    prepare(config)
    added = write_jsonl(corpus / "added.jsonl", ["x"])
    with pytest.raises(UsageError, match=r"added\.jsonl is new"):
        prepare(config)
    added.unlink()
    os.utime(corpus / "b.txt", ns=(0, 0))
    with pytest.raises(UsageError, match=r"b\.txt has changed"):
        prepare(config)
    (corpus / "b.txt").unlink()
    with pytest.raises(UsageError, match=r"b\.txt is gone"):
        prepare(config)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(train_bpe(["ab"], 258))
    with pytest.raises(UsageError, match="another tokenizer"):
        prepare(dataclasses.replace(config, tokenizer=str(tokenizer)))


def test_a_place_that_cannot_be_written_is_named(
    corpus: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(UsageError, match=r"--out .*a\.jsonl is a file"):
        prepare(config_of(corpus, corpus / "a.jsonl"))
    with pytest.raises(UsageError, match=r"/proc/nowhere cannot be written to: "):
        prepare(config_of(corpus, "/proc/nowhere"))


def test_nothing_that_can_be_used_is_an_error(tmp_path: pathlib.Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    (tmp_path / "a.png").write_bytes(b"x")
    config = config_of(tmp_path, tmp_path / "out", field="body")
    with pytest.raises(DataError, match=r"no text in field 'body': 2, such as .*a\.jsonl:byte 0"):
        prepare(config)
    manifest = prepare(dataclasses.replace(config, field="text"))
    assert manifest.dropped["file of unknown kind"].examples == [str(tmp_path / "a.png")]


def test_a_corpus_that_changes_while_it_is_read_is_an_error(
    corpus: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    def change(done: int, _total: int) -> None:
        if done:
            write_jsonl(corpus / "deeper" / "c.ndjson", ["other"])

    with pytest.raises(DataError, match=r"c\.ndjson changed while it was being prepared"):
        prepare(config_of(corpus, tmp_path / "out"), change)
    prepare(config_of(corpus, tmp_path / "out"))
    prepare(config_of(corpus, tmp_path / "fresh"))
    assert dataset_bytes(tmp_path / "out") == dataset_bytes(tmp_path / "fresh")


def test_progress_ends_with_all_bytes(corpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    seen: list[tuple[int, int]] = []
    prepare(config_of(corpus, tmp_path / "out"), lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in corpus.rglob("*") if path.is_file())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert len(seen) > 5


class _StopError(Exception):
    pass


def _counting(function: Callable[..., Any], most: int) -> tuple[list[Any], Callable[..., Any]]:
    """Returns a list of calls, and a wrapper that fills it and raises after `most` calls."""
    calls: list[Any] = []

    def counted(*arguments: Any) -> Any:
        if len(calls) == most:
            raise _StopError
        calls.append(arguments)
        return function(*arguments)

    return calls, counted


def test_what_is_finished_is_not_made_again(
    corpus: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    spans, counted = _counting(tokenize.read_span, 10**6)
    monkeypatch.setattr(tokenize, "read_span", counted)
    prepare(config_of(corpus, whole))
    num_spans = len(spans)
    config = config_of(corpus, out)
    with monkeypatch.context() as patch:
        _, stopping = _counting(tokenize.read_span, 4)
        patch.setattr(tokenize, "read_span", stopping)
        with pytest.raises(_StopError):
            prepare(config)
    num_finished = sum(
        len(task.piece.spans)
        for task in _piece_tasks(config)
        if (out / "_work" / "pieces" / task.piece_id / "finished.json").exists()
    )
    assert 1 <= num_finished <= 4
    with monkeypatch.context() as patch:
        spans.clear()
        shards, stopping = _counting(preparation.documents_name, 3)
        patch.setattr(preparation, "documents_name", stopping)
        with pytest.raises(_StopError):
            prepare(config)
        assert len(spans) == num_spans - num_finished
    spans.clear()
    last_shards, counted = _counting(preparation._write_files, 10**6)
    monkeypatch.setattr(preparation, "_write_files", counted)
    manifest = prepare(config)
    assert not spans
    num_shards = sum(manifest.num_shards(split) for split in ("train", "heldout"))
    assert len(last_shards) == num_shards - len(shards)
    assert dataset_bytes(out) == dataset_bytes(whole)


def _piece_tasks(config: PrepareConfig) -> list[tokenize.PieceTask]:
    inputs = find_inputs(config)
    job = make_job(config, inputs)
    return [
        tokenize.PieceTask(job=job, piece=piece)
        for piece in pieces.plan_pieces(inputs.found.files, job.reading)
    ]
