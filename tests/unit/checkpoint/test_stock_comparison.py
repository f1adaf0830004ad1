"""Compares how torch's own checkpoints and Paceline's handle the same damage."""

import collections
import logging
import pathlib
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_leaves

from paceline.checkpoint.restore import load_step
from paceline.checkpoint.state import load_training_state
from tests.unit.checkpoint.runs import SmallRun, equal, save_steps

_FLIPS = 400
_WIDTH = 400
Damage = Callable[[pathlib.Path, pathlib.Path], None]


def _outcomes(
    directory: pathlib.Path, older: pathlib.Path, check: Callable[[], str]
) -> Iterator[tuple[str, str]]:
    """Yields each kind of damage to a checkpoint and the outcome of loading it."""
    copy = directory.with_name(f"{directory.name}-copy")
    shutil.copytree(directory, copy)
    files = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    chosen = random.Random(0)
    places = [(file, b) for file in files for b in range((directory / file).stat().st_size)]

    def flip(file: pathlib.Path, byte: int) -> None:
        content = bytearray(file.read_bytes())
        content[byte] ^= 1 << chosen.randrange(8)
        file.write_bytes(content)

    todo: list[tuple[str, Callable[[], object]]] = [
        ("bit flipped", lambda f=file, b=byte: flip(directory / f, b))
        for file, byte in chosen.sample(places, _FLIPS)
    ]
    for file in files:
        whole = (directory / file).read_bytes()
        todo += [
            ("truncated", lambda f=file, w=whole: (directory / f).write_bytes(w[: len(w) // 2])),
            ("removed", lambda f=file: (directory / f).unlink()),
            ("swapped with an older one", lambda f=file: shutil.copy(older / f, directory / f)),
        ]
    for kind, damage in todo:
        damage()
        yield kind, check()
        shutil.rmtree(directory, ignore_errors=True)
        for extra in directory.parent.glob(f"{directory.name}.damaged-*"):
            shutil.rmtree(extra)
        shutil.copytree(copy, directory)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_is_found(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging.disable(logging.CRITICAL)  # torch logs each failure with its traceback.
    saved = save_steps(tmp_path / "ours", [1, 2], width=_WIDTH)
    for step in (1, 2):
        run = SmallRun(width=_WIDTH)
        _load(run, tmp_path / "ours", step)
        dcp.save(run.state(), checkpoint_id=tmp_path / "stock" / f"step-{step}")
    expected = _tensors(run.state())

    def check_ours() -> str:
        run = SmallRun(seed=7, width=_WIDTH)
        restored = run.load(tmp_path / "ours")
        assert restored is not None
        if restored.step == 1 and equal(run.numbers(), saved[1]):
            return "found, older one used"
        return "loaded silently"

    def check_stock() -> str:
        run = SmallRun(seed=7, width=_WIDTH)
        run.step()
        loaded = run.state()
        try:
            dcp.load(loaded, checkpoint_id=tmp_path / "stock" / "step-2")
        except BaseException as error:  # torch's own failure is not an Exception.
            return f"error ({type(error).__name__})"
        is_right = equal(_tensors(loaded), expected)
        return f"loaded silently, numbers {'right' if is_right else 'wrong'}"

    lines = []
    for name, new, old, check in (
        ("ours", "ours/step-00000002", "ours/step-00000001", check_ours),
        ("stock", "stock/step-2", "stock/step-1", check_stock),
    ):
        counts = collections.Counter(_outcomes(tmp_path / new, tmp_path / old, check))
        lines += [
            f"{name:6} {kind:26} {what:45} {n:4}" for (kind, what), n in sorted(counts.items())
        ]
        if name == "ours":
            assert all(what == "found, older one used" for _, what in counts)
    logging.disable(logging.NOTSET)
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [one for one in tree_leaves(state) if isinstance(one, torch.Tensor)]


def _load(run: SmallRun, place: pathlib.Path, step: int) -> None:
    load_step(
        place, step, lambda source: load_training_state(source, run.model, {"main": run.optimizer})
    )
