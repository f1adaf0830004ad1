"""Damages checkpoints at random, and checks that the previous one is loaded instead.

Each trial damages the newer of two checkpoints in one way, then loads as a run does when it starts.
The damage is found if the older checkpoint is loaded bit for bit and the message names the newer
one. Any other result counts as lost. Damage that changes no byte, such as swapping two equal files,
is not tried. Appends one `fault` record per kind of damage to the store.

    python -m studies.reliability.checkpoint_damage results/checkpoint-damage.jsonl
"""

import os
import pathlib
import random
import shutil
import sys
import tempfile
from collections.abc import Callable

import torch
from torch import nn

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.restore import Source, load_newest_valid
from paceline.core.errors import PacelineError
from studies.harness.records import FaultRecords
from studies.harness.study import study_parser

OLDER, NEWER = 1, 2
_LONGEST_RUN = 4096
"""Largest number of bytes that are zeroed or appended."""

Damage = Callable[[list[pathlib.Path], random.Random], str]
"""Damages files of a checkpoint; returns the name of a damaged file."""


def state(step: int) -> dict[str, torch.Tensor]:
    """Returns the state at a step: a few tensors, each saved in its own file."""
    torch.manual_seed(step)
    return dict(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).state_dict())


def flip_bit(files: list[pathlib.Path], chance: random.Random) -> str:
    """Flips one bit."""
    file, place = _any_byte(files, chance)
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return file.name


def cut(files: list[pathlib.Path], chance: random.Random) -> str:
    """Truncates a file at a random offset, possibly to zero bytes."""
    file, place = _any_byte(files, chance)
    os.truncate(file, place)
    return file.name


def extend(files: list[pathlib.Path], chance: random.Random) -> str:
    """Appends random bytes to a file."""
    file = chance.choice(files)
    with file.open("ab") as content:
        content.write(chance.randbytes(chance.randint(1, _LONGEST_RUN)))
    return file.name


def zero(files: list[pathlib.Path], chance: random.Random) -> str:
    """Replaces a run of bytes with zeros, like a lost block."""
    while True:
        file, place = _any_byte(files, chance)
        content = bytearray(file.read_bytes())
        end = min(place + chance.randint(1, _LONGEST_RUN), len(content))
        if any(content[place:end]):
            content[place:end] = bytes(end - place)
            file.write_bytes(content)
            return file.name


def delete(files: list[pathlib.Path], chance: random.Random) -> str:
    """Deletes a file."""
    file = chance.choice(files)
    file.unlink()
    return file.name


def swap(files: list[pathlib.Path], chance: random.Random) -> str:
    """Swaps the contents of two files that differ."""
    while True:
        one, other = chance.sample(files, 2)
        first, second = one.read_bytes(), other.read_bytes()
        if first != second:
            one.write_bytes(second), other.write_bytes(first)
            return one.name


def age(files: list[pathlib.Path], chance: random.Random) -> str:
    """Replaces a file with that of the older checkpoint."""
    file = chance.choice(files)
    older = pathlib.Path(str(file).replace(f"step-{NEWER:08}", f"step-{OLDER:08}"))
    shutil.copyfile(older, file)
    return file.name


DAMAGES: dict[str, Damage] = {
    "one bit flipped": flip_bit,
    "a file cut": cut,
    "a file extended": extend,
    "a run of bytes zeroed": zero,
    "a file deleted": delete,
    "two files swapped": swap,
    "a file of an older checkpoint": age,
}


def _any_byte(files: list[pathlib.Path], chance: random.Random) -> tuple[pathlib.Path, int]:
    """Returns a random file and a uniformly random offset in it."""
    file = chance.choice(files)
    return file, chance.randrange(file.stat().st_size)


def try_damage(saved: pathlib.Path, place: pathlib.Path, damage: Damage, seed: int) -> str:
    """Returns the problem of one trial; empty if the older checkpoint was loaded."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(saved, place)
    files = sorted(path for path in (place / f"step-{NEWER:08}").rglob("*") if path.is_file())
    damaged = damage(files, random.Random(seed))
    loaded = {name: torch.empty_like(values) for name, values in state(OLDER).items()}

    def load(source: Source) -> None:
        source.load(loaded)

    try:
        restored = load_newest_valid(place, load)
    except PacelineError as error:
        return f"seed {seed}, {damaged}: nothing is loaded: {error}"
    if restored is None or restored.step != OLDER:
        return f"seed {seed}, {damaged}: not found"
    if any(not torch.equal(values, loaded[name]) for name, values in state(OLDER).items()):
        return f"seed {seed}, {damaged}: what is loaded is not what was saved"
    (finding,) = restored.passed_over
    if f"step-{NEWER:08}" not in finding.message:
        return f"seed {seed}, {damaged}: the message does not name it: {finding.message}"
    return ""


def main() -> int:
    """Runs all trials, and prints and records their results."""
    parser = study_parser(__doc__)
    parser.add_argument("--trials", type=int, default=300, help="of each sort")
    arguments = parser.parse_args()
    records = FaultRecords(arguments.store)
    with tempfile.TemporaryDirectory() as directory:
        saved, place = pathlib.Path(directory, "saved"), pathlib.Path(directory, "damaged")
        with Checkpointer(saved, keep=2, asynchronous=False, max_file_bytes=1) as checkpointer:
            for step in (OLDER, NEWER):
                checkpointer.save(step, state(step), {"step": step})
        for name, damage in DAMAGES.items():
            wrong = [try_damage(saved, place, damage, seed) for seed in range(arguments.trials)]
            records.add("checkpoint", name, arguments.trials, [each for each in wrong if each])
    return records.exit_code


if __name__ == "__main__":
    sys.exit(main())
