"""Tests that a tokenizer is trained on an even sample of the sources."""

import dataclasses
import pathlib
from collections.abc import Iterable

import pytest

from paceline.core.errors import DataError, UsageError
from paceline.data.prepare import tokenize, train
from paceline.data.prepare.config import TokenizerConfig
from paceline.data.prepare.train import train_tokenizer
from paceline.data.tokenizer import load_tokenizer, train_bpe
from tests.unit.data.corpus import make_documents, write_jsonl


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

    monkeypatch.setattr(train, "train_bpe", listen)
    train_tokenizer(dataclasses.replace(config, sample_bytes=5000))
    assert 4000 < sum(map(len, trained_on)) < 7000
    assert {text[0] for text in trained_on} == set("0123")


def test_what_cannot_be_trained_on_is_named(config: TokenizerConfig) -> None:
    with pytest.raises(DataError, match=r"corpus: no documents to train on; check --field"):
        train_tokenizer(dataclasses.replace(config, field="body"))
    assert not pathlib.Path(config.out).exists()
    with pytest.raises(UsageError, match="is a directory"):
        train_tokenizer(dataclasses.replace(config, out=config.sources[0]))
