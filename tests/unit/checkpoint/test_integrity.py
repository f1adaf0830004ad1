"""Tests that any damage to a checkpoint file is found and named, and an older one is used."""

import pathlib
import random
import re
import shutil
from collections.abc import Callable

import pytest
import torch

from paceline.checkpoint.catalog import list_checkpoints, verify_checkpoint
from paceline.checkpoint.errors import CheckpointError, DamagedCheckpointError
from tests.unit.checkpoint.runs import SmallRun, equal, save_steps

OLD, NEW = 10, 20
NEW_NAME = "step-00000020"


class Pair:
    """Two checkpoints of a run; tests damage the newer one in many ways."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.place = directory / "checkpoints"
        self.saved = save_steps(self.place, [OLD, NEW], max_file_bytes=400)
        self.copy = directory / "copy"
        shutil.copytree(self.place, self.copy)
        self.run = SmallRun(seed=3)

    def files(self) -> list[pathlib.Path]:
        return sorted((self.place / NEW_NAME).iterdir())

    def require_found(self, file: pathlib.Path, what: str) -> None:
        """Requires that verify and load find and name the damage, and load the older checkpoint."""
        findings = list(verify_checkpoint(self.place, NEW))
        assert findings, f"{what}: verify found nothing"
        assert any(file.name in finding.message for finding in findings), f"{what}: {findings}"
        restored = self.run.load(self.place)
        assert restored is not None
        assert restored.step == OLD, f"{what}: loaded all the same"
        assert file.name in restored.passed_over[0].message, what
        assert equal(self.run.numbers(), self.saved[OLD]), what
        self.restore()

    def restore(self) -> None:
        shutil.rmtree(self.place)
        shutil.copytree(self.copy, self.place)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("integrity"))


def test_undamaged_the_newer_is_loaded(pair: Pair) -> None:
    assert len(pair.files()) > 3
    restored = pair.run.load(pair.place)
    assert restored is not None
    assert (restored.step, restored.passed_over) == (NEW, [])
    assert equal(pair.run.numbers(), pair.saved[NEW])


def _flip(pair: Pair, number: int, seed: int) -> None:
    chosen = random.Random(seed)
    places = [(file, byte) for file in pair.files() for byte in range(file.stat().st_size)]
    # The first and last byte of every file, then random bytes.
    ends = [(file, byte) for file in pair.files() for byte in (0, file.stat().st_size - 1)]
    for file, byte in [*ends, *chosen.sample(places, number - len(ends))]:
        content = bytearray(file.read_bytes())
        content[byte] ^= 1 << chosen.randrange(8)
        file.write_bytes(content)
        pair.require_found(file, f"{file.name}, byte {byte}")


def test_flipped_bits(pair: Pair) -> None:
    _flip(pair, 100, seed=0)


@pytest.mark.slow
def test_flipped_bits_at_2000_places(pair: Pair) -> None:
    _flip(pair, 2_000, seed=1)


def _truncate(file: pathlib.Path, _older: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _empty(file: pathlib.Path, _older: pathlib.Path) -> None:
    file.write_bytes(b"")


def _lengthen(file: pathlib.Path, _older: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def _remove(file: pathlib.Path, _older: pathlib.Path) -> None:
    file.unlink()


def _swap(file: pathlib.Path, older: pathlib.Path) -> None:
    shutil.copy(older, file)


def _zero_the_end(file: pathlib.Path, _older: pathlib.Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-8] + bytes(8))


@pytest.mark.parametrize(
    "damage",
    [_truncate, _empty, _lengthen, _remove, _swap, _zero_the_end],
    ids=lambda f: f.__name__,
)
def test_damaged_files(pair: Pair, damage: Callable[[pathlib.Path, pathlib.Path], None]) -> None:
    for file in pair.files():
        damage(file, pair.place / "step-00000010" / file.name)
        pair.require_found(file, file.name)


def test_a_tensor_and_the_rank_that_saved_it_are_named(pair: Pair) -> None:
    file = pair.files()[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    restored = pair.run.load(pair.place)
    assert restored is not None
    assert re.search(
        rf"rank 0: .*{NEW_NAME}/rank-00000-00000.safetensors: tensor '[\w.]+', saved by rank 0, "
        r"is corrupted: bytes \d+ to \d+ do not match their digest",
        restored.passed_over[0].message,
    )
    aside = [path.name for path in pair.place.iterdir() if ".damaged-" in path.name]
    assert len(aside) == 1  # Kept for inspection; the step can be saved again.
    assert [summary.step for summary in list_checkpoints(pair.place)] == [OLD]
    pair.restore()


def test_damage_to_what_nobody_asked_for_is_found(pair: Pair) -> None:
    """Loads only the model, while the optimizer's state is damaged."""
    from paceline.checkpoint.restore import load_newest_valid, load_step

    content = (pair.place / NEW_NAME / "manifest.json").read_text()
    files = [file for file in pair.files() if file.suffix == ".safetensors"]
    for file in files:
        if b"exp_avg" in file.read_bytes():
            broken = file
    damaged = bytearray(broken.read_bytes())
    damaged[-1] ^= 1
    broken.write_bytes(damaged)
    assert "exp_avg" in content
    weights = {"model": {"0.weight": torch.zeros(7, 5)}}
    with pytest.raises(DamagedCheckpointError, match=broken.name):
        load_step(pair.place, NEW, lambda source: source.load(weights))
    restored = load_newest_valid(pair.place, lambda source: source.load(weights))
    assert restored is not None
    assert restored.step == OLD
    pair.restore()


def test_where_all_are_damaged_nothing_is_loaded(pair: Pair) -> None:
    for step in ("step-00000010", NEW_NAME):
        (pair.place / step / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is intact; the newest: "):
        pair.run.load(pair.place)
    pair.restore()


def test_a_manifest_of_a_later_version_is_refused_and_stays(pair: Pair) -> None:
    from paceline.checkpoint.format import _seal

    (pair.place / NEW_NAME / "manifest.json").write_bytes(_seal(b'{"schema":99}'))
    with pytest.raises(CheckpointError, match="schema 99, but this version of Paceline reads 1"):
        pair.run.load(pair.place)
    assert (pair.place / NEW_NAME).is_dir()
    pair.restore()
