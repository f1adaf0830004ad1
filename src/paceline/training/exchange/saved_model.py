"""The model in a checkpoint, independent of ranks, strategies and optimizers."""

import dataclasses
import pathlib
from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.data.format.manifest import TOKENIZER
from paceline.data.storage import open_storage
from paceline.training.checkpoint.catalog import Checkpoint, complete_steps, open_checkpoint
from paceline.training.checkpoint.errors import CheckpointError
from paceline.training.checkpoint.places import open_place
from paceline.training.checkpoint.restore import Source
from paceline.training.checkpoint.state.identity import RunIdentity, identity_of
from paceline.training.checkpoint.state.training import MODEL
from paceline.training.checkpoint.torch_storage.dtypes import dtype_of
from paceline.training.run_files import CHECKPOINTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The model part of a checkpoint."""

    checkpoint: Checkpoint
    identity: RunIdentity
    tokenizer_json: str | None
    """Tokenizer of the run, if it is next to the checkpoints."""

    @property
    def step(self) -> int:
        """Number of steps that the model was trained for."""
        return self.checkpoint.step

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, on the meta device: shapes and dtypes without values."""
        return {
            name.removeprefix(f"{MODEL}."): torch.empty(
                entry.shape, dtype=dtype_of(entry.dtype), device="meta"
            )
            for name, entry in self.checkpoint.manifest.tensors.items()
            if name.startswith(f"{MODEL}.")
        }

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads whole tensors, regardless of how ranks split them, and verifies every byte."""
        known = self.tensors
        state = {name: torch.empty_like(known[name], device="cpu") for name in names}
        Source(self.checkpoint).load({MODEL: state})
        return state


def open_saved_model(where: str, step: int | None = None) -> SavedModel:
    """Opens the model in a checkpoint, without reading any tensor.

    Args:
        where: Directory of a run, or location of its checkpoints.
        step: Step of the checkpoint; by default the newest complete one.
    """
    if "://" not in where and (pathlib.Path(where) / CHECKPOINTS).is_dir():
        run, place = where, open_place(pathlib.Path(where) / CHECKPOINTS)
    else:
        run, place = _parent(where), open_place(where)
    steps = place.steps()
    if step is None:
        step = next(complete_steps(place), None)
    if step is None or step not in steps:
        what = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(
            f"{where}: no {what}; give the directory of a run or the place of its checkpoints; "
            "`paceline checkpoint list` shows what is there"
        )
    checkpoint = open_checkpoint(place, step)
    return SavedModel(
        checkpoint=checkpoint, identity=identity_of(checkpoint), tokenizer_json=_tokenizer(run)
    )


def _parent(where: str) -> str:
    if "://" in where:
        return where.rstrip("/").rpartition("/")[0]
    return str(pathlib.Path(where).absolute().parent)


def _tokenizer(run: str) -> str | None:
    try:
        return open_storage(run).read(TOKENIZER).decode()
    except FileNotFoundError:
        return None
