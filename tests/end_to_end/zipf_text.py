"""Tokens of text whose words follow Zipf's law, and a config for runs on them."""

import json
import pathlib
import random

from tests.processes import call_paceline


def small_run(*, steps: int, save_every: int) -> tuple[str, ...]:
    """Returns the options of a command that make a run quick.

    Args:
        steps: Steps of the run.
        save_every: Steps between two checkpoints.
    """
    sizes = ("num_layers=2", "d_model=32", "num_heads=2", "d_ff=64")
    values = (
        *(f"model.{size}" for size in sizes),
        *("data.context_length=32", "evaluation.sequences=4"),
        *(f"training.steps={steps}", f"checkpoint.every_steps={save_every}"),
    )
    return tuple(word for value in values for word in ("--set", value))


def last_step(run: pathlib.Path) -> int:
    """Returns the step of a run's newest row; 0 if there is none, or not yet a whole one."""
    try:
        return json.loads(run.joinpath("metrics.jsonl").read_bytes().splitlines()[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0


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
