"""Tests of ``paceline data`` from text files to a verified dataset, as typed by a user."""

import json
import pathlib

import numpy as np
import pytest

from tests.processes import call_paceline, paceline

_SENTENCE = "All this happened, more or less, to ship number {}. "


def _paceline(*arguments: str, cwd: pathlib.Path, code: int = 0) -> str:
    result = call_paceline(cwd, *arguments)
    assert result.returncode == code, result.stderr
    return result.stdout if code != 2 else result.stderr


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(30):
        (corpus / f"{number:02d}.txt").write_text(_SENTENCE.format(number) * (number + 3))
    (corpus / "again.txt").write_text(_SENTENCE.format(7) * 10)
    (corpus / "latin.txt").write_bytes("Größe".encode("latin-1"))
    return tmp_path


def test_from_text_to_a_verified_dataset(place: pathlib.Path) -> None:
    trained = ("data", "tokenizer", "corpus", "--vocab-size", "300", "--out", "tokenizer.json")
    assert _paceline(*trained, cwd=place) == "tokenizer.json: 300 tokens\n"
    prepared = ("data", "prepare", "corpus", "--tokenizer", "tokenizer.json", "--out", "tokens")
    options = ("--heldout", "0.2", "--shard-tokens", "1000", "--workers", "2")
    # In a process of its own, because it starts workers.
    first = paceline(place, *prepared, *options, "--json")
    assert first.returncode == 0, first.stderr
    summary = json.loads(first.stdout)
    splits = summary["splits"]
    assert splits["train"]["num_documents"] + splits["heldout"]["num_documents"] == 30
    assert {reason: each["num_documents"] for reason, each in summary["dropped"].items()} == {
        "duplicate": 1,
        "invalid UTF-8": 1,
    }
    assert splits["train"]["num_shards"] == -(-splits["train"]["num_tokens"] // 1000) > 1
    # A second run has nothing to do.
    before = (place / "tokens" / "manifest.json").stat().st_mtime_ns
    assert "latin.txt" in _paceline(*prepared, *options, cwd=place)
    assert (place / "tokens" / "manifest.json").stat().st_mtime_ns == before

    shown = _paceline("data", "show", "tokens", "--figure", "lengths.png", cwd=place)
    assert "| All this happened, more or less, to ship number" in shown
    assert (place / "lengths.png").stat().st_size > 10_000
    assert json.loads(_paceline("data", "show", "tokens", "--json", cwd=place))["lengths"]

    intact = _paceline("data", "verify", "tokens", cwd=place)
    num_shards = sum(split["num_shards"] for split in splits.values())
    assert intact == f"tokens: {num_shards} shards are intact\n"

    _paceline("data", "export", "tokens", "--out", "megatron", cwd=place)
    exported = np.fromfile(place / "megatron.bin", np.uint16)
    shards = sorted((place / "tokens" / "train").glob("*.tokens"))
    assert np.array_equal(exported, np.concatenate([np.fromfile(s, np.uint16) for s in shards]))

    with shards[1].open("r+b") as damaged:
        damaged.write(b"\xff")
    found = _paceline("data", "verify", "tokens", cwd=place, code=1)
    assert "00000001.tokens does not match its digest" in found


def test_what_is_wrong_is_said_in_one_line(place: pathlib.Path) -> None:
    prepare = ("data", "prepare", "corpus", "--out", "tokens", "--tokenizer")
    assert "`paceline data tokenizer` trains one" in _paceline(*prepare, "none", cwd=place, code=2)
    result = _paceline("data", "show", "corpus", cwd=place, code=1)
    assert result == ""
