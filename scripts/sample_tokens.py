"""A small prepared dataset for measurements, identical on every machine."""

import pathlib

from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.run import prepare


def prepare_sample(place: pathlib.Path) -> str:
    """Prepares a text of numbered lines in a directory, and returns the path of its tokens."""
    text = "".join(f"{number} bottles of water on the wall.\n" for number in range(20_000))
    (place / "text.txt").write_text(text)
    tokens = str(place / "tokens")
    prepare(PrepareConfig(sources=(str(place / "text.txt"),), tokenizer="bytes", out=tokens))
    return tokens
