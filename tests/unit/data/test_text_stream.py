"""Tests that decoding token by token gives the same text as decoding all tokens at once."""

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

from paceline.data.tokenizer import TextStream, Tokenizer, byte_tokenizer_json, train_bpe

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
