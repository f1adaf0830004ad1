"""Damages the newest checkpoint of a run: flips a bit or truncates a file."""

import os
import pathlib
import random

from paceline.training.checkpoint.places.names import parse_step
from paceline.training.run_files import CHECKPOINTS

_FEWEST = 2
"""Minimum number of checkpoints: the damaged one, and one to fall back on."""


def damage_newest(run: pathlib.Path, choice: float) -> str | None:
    """Damages one file of the newest checkpoint; returns a description of the damage.

    Does nothing and returns None if there is no other checkpoint to fall back on.
    """
    steps = {
        step: path
        for path in (run / CHECKPOINTS).glob("*")
        if (step := parse_step(path.name)) is not None
    }
    if len(steps) < _FEWEST:
        return None
    newest = steps[max(steps)]
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        return None
    chance = random.Random(choice)
    file = chance.choice(files)
    place = chance.randrange(file.stat().st_size)
    name = file.relative_to(run)
    if chance.random() < 0.5:
        os.truncate(file, place)
        return f"{name} cut to {place:,} bytes"
    with file.open("r+b") as content:
        content.seek(place)
        byte = content.read(1)[0]
        content.seek(place)
        content.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return f"{name}, one bit of byte {place:,} flipped"
