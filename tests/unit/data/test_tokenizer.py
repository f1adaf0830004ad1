"""Tests that tokenizers encode documents exactly, and that text is decoded in whole characters."""

import pathlib

import numpy as np
import pytest
import tokenizers
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

from paceline.core.errors import DataError, UsageError
from paceline.data import tokenizer as tokenizer_module
from paceline.data.tokenizer import (
    END_OF_DOCUMENT,
    TextStream,
    Tokenizer,
    byte_tokenizer_json,
    load_tokenizer,
    train_bpe,
)
from tests.unit.data.corpus import make_documents

HARD = ["", "a", "\x00\n\r\t", "naïve 🌊 ∑", f"says {END_OF_DOCUMENT} itself", " two  spaces "]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer(train_bpe(make_documents(200), 300))


def test_a_trained_tokenizer_has_the_size_asked_for(bpe: Tokenizer) -> None:
    assert bpe.vocab_size == 300
    assert bpe.dtype == np.uint16
    assert train_bpe(make_documents(200), 300) == bpe.json


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_text_comes_back_and_batches_do_not_matter(name: str, bpe: Tokenizer) -> None:
    tokenizer = bpe if name == "bpe" else load_tokenizer("bytes")
    together, lengths = tokenizer.encode_documents(HARD)
    alone = [tokenizer.encode_documents([text])[0] for text in HARD]
    assert np.array_equal(together, np.concatenate(alone))
    assert lengths.tolist() == [len(each) for each in alone]
    assert [tokenizer.decode(each) for each in alone] == HARD
    for tokens in tokenizer.encode_batch(HARD):
        assert tokenizer.end_of_document not in tokens
    assert (together == tokenizer.end_of_document).sum() == len(HARD)


def test_the_byte_vocabulary_is_a_tokenizer_json_with_the_same_ids() -> None:
    ours = load_tokenizer("bytes")
    theirs = tokenizers.Tokenizer.from_str(byte_tokenizer_json())
    theirs.encode_special_tokens = True
    assert (ours.vocab_size, ours.end_of_document) == (256, 255)
    for text in [*HARD, *make_documents(20)]:
        ids = ours.encode_batch([text])[0].tolist()
        assert ids == list(text.encode()) == theirs.encode(text).ids


def test_any_tokenizer_json_is_loaded_with_its_end(tmp_path: pathlib.Path, bpe: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.json)
    assert load_tokenizer(path).blake3 == load_tokenizer(tmp_path).blake3 == bpe.blake3
    assert load_tokenizer(path, "e").end_of_document != bpe.end_of_document
    with pytest.raises(UsageError, match="--end-of-document '<eod>'"):
        load_tokenizer(path, "<eod>")


@pytest.mark.parametrize("prefix", ["never", "first", "always"])
def test_a_long_document_is_encoded_as_if_it_were_whole(
    prefix: str, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = bpe
    if prefix != "never":
        inner = tokenizers.Tokenizer.from_str(bpe.json)
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prefix)
        inner.model.unk_token = "a"
        tokenizer = Tokenizer(inner.to_str())
    texts = [" ".join(make_documents(40)), "short", "x" * 3000 + "\n\n" * 500, "a b " * 900]
    whole = tokenizer.encode_documents(texts)
    monkeypatch.setattr(tokenizer_module, "PART_CHARACTERS", 300)
    monkeypatch.setattr(tokenizer_module, "_CUT_REGION", 100)
    parts = tokenizer.encode_documents(texts)
    assert all(map(np.array_equal, parts, whole))
    assert len(list(tokenizer._parts(texts[0]))) > (5 if prefix == "never" else 0)
    assert "".join(tokenizer._parts(texts[0])) == texts[0]


def test_padding_and_truncation_of_a_tokenizer_are_off(bpe: Tokenizer) -> None:
    inner = tokenizers.Tokenizer.from_str(bpe.json)
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    assert np.array_equal(
        Tokenizer(inner.to_str()).encode_documents(HARD)[0], bpe.encode_documents(HARD)[0]
    )


def test_a_vocabulary_without_an_end_is_refused() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(UsageError, match=r"words\.json.*--end-of-document"):
        Tokenizer(inner.to_str(), where="words.json")


def test_a_vocabulary_with_holes_counts_up_to_its_last_id() -> None:
    words = {END_OF_DOCUMENT: 0, "b": 70_000}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=END_OF_DOCUMENT))
    tokenizer = Tokenizer(inner.to_str())
    assert tokenizer.vocab_size == 70_001
    assert tokenizer.dtype == np.uint32


def test_what_is_no_tokenizer_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"missing.json.*paceline data tokenizer"):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match=r"other.json"):
        load_tokenizer(tmp_path / "other.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"binary.json"):
        load_tokenizer(tmp_path / "binary.json")
    with pytest.raises(UsageError, match="--vocab-size 256"):
        train_bpe(["a"], 256)


TEXT = "Naïve: 你好, 👩‍👩‍👧 — done."


def _metaspace() -> str:
    vocabulary = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3, "</s>": 4}
    made = Inner(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    made.decoder = decoders.Metaspace()
    return made.to_str()


@pytest.mark.parametrize("json", [byte_tokenizer_json(), train_bpe([TEXT], 270)])
def test_every_piece_is_whole_characters(json: str) -> None:
    tokenizer = Tokenizer(json)
    stream = TextStream(tokenizer)
    (tokens,) = tokenizer.encode_batch([TEXT])
    pieces = [stream.add(int(token)) for token in tokens]
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(list(filter(None, pieces))) > 10
    assert stream.finish() == ""


def test_blanks_between_words_are_kept() -> None:
    tokenizer = Tokenizer(_metaspace())
    stream = TextStream(tokenizer)
    tokens = [1, 3, 2, 1]
    assert "".join(map(stream.add, tokens)) == tokenizer.decode(tokens) == "ac b a"


def test_bytes_that_are_no_text_do_not_stop_it() -> None:
    stream = TextStream(Tokenizer(byte_tokenizer_json()))
    assert stream.add(0xC3) == ""
    assert stream.add(0xC3) == ""
    assert stream.add(ord("a")) == "\ufffd\ufffda"
    assert stream.add(0xE4) == ""
    assert stream.finish() == "\ufffd"
