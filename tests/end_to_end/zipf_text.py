"""Tokens of text whose words follow Zipf's law, and a config for runs on them."""

import pathlib
import random

from tests.processes import call_paceline


def prepare_text(place: pathlib.Path, config: str, *, num_files: int = 100) -> None:
    """Writes tokens, some 8,000 per file, and a config named `config`, into a directory."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 8))) for _ in range(2000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    (place / "corpus").mkdir()
    for number in range(num_files):
        text = " ".join(chance.choices(words, weights, k=1500))
        (place / "corpus" / f"{number}.txt").write_text(text)
    made = call_paceline(
        place,
        *("data", "prepare", "corpus", "--tokenizer", "bytes", "--out", "tokens"),
        *("--heldout", "0.1"),
    )
    assert made.returncode == 0, made.stderr
    (place / config).write_text(call_paceline(place, "train", "init").stdout)
