"""Ranks killed at any moment while saving leave a checkpoint that loads."""

import os
import pathlib
import random
import signal
import sys
import threading

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_stock
from torch.distributed.checkpoint.state_dict_saver import save as save_stock

from paceline.checkpoint.catalog import list_checkpoints
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.restore import load_newest_valid
from paceline.parallel import RankError
from paceline.parallel.zero.optimizer_checkpoint import FlatPiece
from tests.distributed.device_pool import DevicePool

# Ranks are killed as long after their start as a save on a CPU takes.
pytestmark = pytest.mark.host("its moments are those of a CPU's saves")
ELEMENTS = 200_000
KEYS = 4
PUBLISHED = "published"


def _values(step: int, key: int) -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32) + 1000.0 * step + key


def _state(rank: int, world_size: int, step: int) -> dict[str, torch.Tensor]:
    first, last = (ELEMENTS * one // world_size for one in (rank, rank + 1))
    return {
        str(key): FlatPiece.of(_values(step, key)[first:last].clone(), first, ELEMENTS)
        for key in range(KEYS)
    }


def _save_until_killed(
    rank: int, world_size: int, place: str, first: int, victim: int, after_s: float
) -> None:
    if rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with Checkpointer(place, keep=2) as checkpointer:
        for step in range(first, first + 10_000):
            checkpointer.save(step, _state(rank, world_size, step), {"step": step})
            if rank == 0 and step > first:
                note = pathlib.Path(place, f"{PUBLISHED}-new")
                note.write_text(str(step - 1))
                note.replace(pathlib.Path(place, PUBLISHED))


def _kill(place: pathlib.Path, number: int, seed: int) -> None:
    chosen = random.Random(seed)
    place.mkdir(exist_ok=True)
    last, seen = -1, 0
    with DevicePool(2, timeout_s=60) as pool:
        for _ in range(number):
            with pytest.raises(RankError, match="rank"):
                pool.run(
                    _save_until_killed,
                    str(place),
                    last + 1,
                    chosen.randrange(2),
                    chosen.uniform(0.05, 0.8),
                )
            loaded = {str(key): torch.empty(ELEMENTS) for key in range(KEYS)}
            restored = load_newest_valid(place, lambda source, to=loaded: source.load(to))
            if (place / PUBLISHED).exists():
                seen = int((place / PUBLISHED).read_text())
            if restored is None:
                assert not seen
                continue
            assert not restored.passed_over
            assert restored.step >= seen
            assert restored.step >= last
            last = restored.step
            for key in range(KEYS):
                assert torch.equal(loaded[str(key)], _values(last, key))
    assert last > 0
    assert 1 <= len(list_checkpoints(place)) <= 3
    Checkpointer(place).close()
    assert not [path for path in place.iterdir() if ".tmp-" in path.name]


def test_killed_while_saving(tmp_path: pathlib.Path) -> None:
    _kill(tmp_path / "few", 5, seed=0)


@pytest.mark.slow
def test_killed_100_times_while_saving(tmp_path: pathlib.Path) -> None:
    _kill(tmp_path / "many", 100, seed=1)


def _save_stock_until_killed(
    rank: int, world_size: int, place: str, first: int, victim: int, after_s: float
) -> None:
    if rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(first, first + 10_000):
        save_stock(_state(rank, world_size, step), checkpoint_id=place)


@pytest.mark.slow
def test_stock_checkpoints_for_comparison(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts losses with torch's save, which overwrites one directory as in its documentation."""
    chosen = random.Random(2)
    lost, kills = 0, 20
    with DevicePool(2, timeout_s=60) as pool:
        for kill in range(kills):
            place = tmp_path / str(kill)
            with pytest.raises(RankError, match="rank"):
                pool.run(
                    _save_stock_until_killed,
                    str(place),
                    1,
                    chosen.randrange(2),
                    chosen.uniform(0.3, 0.8),
                )
            loaded = {str(key): torch.empty(ELEMENTS) for key in range(KEYS)}
            try:
                load_stock(loaded, checkpoint_id=place)
                step = round((loaded["0"][0] / 1000).item())
                lost += not all(torch.equal(loaded[str(k)], _values(step, k)) for k in range(KEYS))
            except BaseException:  # torch's CheckpointException is not an Exception.
                lost += 1
    with capsys.disabled():
        sys.stdout.write(f"\nstock: of {kills} kills, {lost} left nothing whole to load\n")
