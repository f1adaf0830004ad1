"""What compressed messages have left out of gradients, in a checkpoint.

Two kinds of entries for each parameter, both flat, of which every rank saves its own range:

    residual.out.NAME   as many numbers as the parameter has, once for each rank in turn: what the
                        rank's messages have left out of its gradients
    residual.back.NAME  as many numbers as the parameter has: what messages have left out of sums,
                        each range saved by the rank that sums it

At another number of ranks, rank r takes over what ranks r, r + n, r + 2 n, ... of n ranks left out,
so that nothing is lost. Containers without compression save nothing and ignore what is saved; what
a checkpoint does not have is zero.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from paceline.checkpoint.errors import REMEDY, CheckpointError
from paceline.checkpoint.restore import Source
from paceline.parallel.compression.residual import Residual
from paceline.parallel.ddp import DataParallel
from paceline.parallel.zero.optimizer_checkpoint import FlatPiece

RESIDUAL = "residual"


def residual_state(model: nn.Module) -> dict[str, Any]:
    """Returns the residuals that this rank saves; empty without compression."""
    residuals = _residuals(model)
    if not residuals:
        return {}
    rank, num_ranks = _place(model)
    return {
        RESIDUAL: {
            _entry(residual): _piece(residual, residual.numbers, rank, num_ranks)
            for residual in residuals
        }
    }


@torch.no_grad()
def load_residuals(source: Source, model: nn.Module) -> None:
    """Loads a model's residuals from a checkpoint; all ranks must call it."""
    residuals = _residuals(model)
    saved = source.reader.read_metadata().state_dict_metadata
    rank, num_ranks = _place(model) if residuals else (0, 1)
    known: list[tuple[Residual, int]] = []
    for residual in residuals:
        residual.numbers.zero_()
        name = f"{RESIDUAL}.{_entry(residual)}"
        if (entry := saved.get(name)) is not None:
            known.append((residual, _num_saved(name, entry, residual.total)))
    # The number of rounds is the same on all ranks: all have the same parameters.
    for number in itertools.count():
        round_of = [
            (residual, num_saved, rank + number * num_ranks)
            for residual, num_saved in known
            if number * num_ranks < num_saved and (residual.is_out or number == 0)
        ]
        if not round_of:
            return
        read = {
            _entry(residual): (residual, torch.empty_like(residual.numbers), source_rank, num_saved)
            for residual, num_saved, source_rank in round_of
            if source_rank < num_saved or not residual.is_out
        }
        source.load(
            {
                RESIDUAL: {
                    name: _piece(residual, numbers, source_rank, num_saved)
                    for name, (residual, numbers, source_rank, num_saved) in read.items()
                }
            }
        )
        for residual, numbers, _, _ in read.values():
            residual.numbers.add_(numbers)


def _num_saved(name: str, entry: object, total: int) -> int:
    """Returns the number of times that a saved tensor holds a parameter's numbers."""
    if isinstance(entry, TensorStorageMetadata) and len(entry.size) == 1 and total:
        (size,) = entry.size
        if size % total == 0:
            return size // total
    raise CheckpointError(
        f"the checkpoint's entry {name!r} does not fit a parameter of {total:,} numbers; {REMEDY}"
    )


def _residuals(model: nn.Module) -> list[Residual]:
    return model.residuals() if isinstance(model, DataParallel) else []


def _place(model: nn.Module) -> tuple[int, int]:
    assert isinstance(model, DataParallel)
    group = model.process_group
    return dist.get_rank(group), dist.get_world_size(group)


def _entry(residual: Residual) -> str:
    return f"{'out' if residual.is_out else 'back'}.{residual.name}"


def _piece(residual: Residual, numbers: Tensor, rank: int, num_ranks: int) -> FlatPiece:
    if not residual.is_out:
        return FlatPiece.of(numbers, residual.start, residual.total)
    start = rank * residual.total + residual.start
    return FlatPiece.of(numbers, start, num_ranks * residual.total)
