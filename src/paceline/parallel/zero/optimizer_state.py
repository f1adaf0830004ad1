"""Saving an optimizer's state shard by shard, and loading it at any number of ranks.

A rank's state dictionary looks like torch's own, with the state of its own shards only, and beside
it which elements of which parameters they are. Parameters are numbered as torch numbers them: over
all groups, in their order. Nothing is sent: every rank saves its own, and reads what it needs.

State that has one number per element of a parameter is cut with the parameter. Whatever else
there is, such as the count of steps, is the same for all pieces of a parameter.
"""

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.parallel.buckets import num_reals, view_like
from paceline.parallel.partition import Partition
from paceline.parallel.zero.flat_parameters import Shard, flat_elements
from paceline.parallel.zero.shard_optimizer import MASTER, NOT_OPTIONS, ShardOptimizer

STEP = "step"  # A parameter without dimensions has state of the same shape.
_SHARDS = "shards"


class OptimizerStateError(PacelineError):
    """A saved state does not fit the optimizer that is to take it, naming the parameter."""


@dataclasses.dataclass(kw_only=True)
class ShardState:
    """State on its way to one shard: what was found of it so far."""

    shard: Shard
    partition: Partition
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_found: int = 0
    """Elements of the shard that some saved piece holds."""
    seen: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    """Pieces that were taken; replicas of a shard save the same one."""

    def take(self, saved: Mapping[str, Any], piece: "SavedPiece") -> None:
        """Takes what a saved piece of the parameter holds of this shard."""
        first, last = max(self.shard.start, piece.start), min(self.shard.end, piece.end)
        if first >= last or (piece.start, piece.end) in self.seen:
            return
        self.seen.add((piece.start, piece.end))
        self.num_found += last - first
        for name, value in saved.items():
            if (flat := piece.elements(name, value)) is None:
                # Optimizers count their steps in place.
                self.values[name] = copy.deepcopy(value)
                continue
            if name not in self.values:
                self.values[name] = torch.empty(self.shard.end - self.shard.start, dtype=flat.dtype)
            part = flat[first - piece.start : last - piece.start]
            self.values[name][first - self.shard.start : last - self.shard.start] = part

    def require_all(self, number: int) -> None:
        """Raises unless all elements were found."""
        length = self.shard.end - self.shard.start
        if self.num_found != length:
            raise OptimizerStateError(
                f"only {self.num_found} of {length} elements that this rank needs of parameter "
                f"{number} are in the states that were given; give load_shards those of all ranks"
            )

    def finished(self) -> dict[str, Any]:
        """Returns the state in the shape that the shard's optimizer keeps it in."""
        if self.partition is Partition.ELEMENTS:
            return self.values
        parameter = self.shard.parameter
        return {
            name: view_like(parameter, value)
            if isinstance(value, Tensor) and value.numel() == self.shard.end and name != STEP
            else value
            for name, value in self.values.items()
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedPiece:
    """Which elements of a parameter a saved state is about."""

    start: int
    end: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_complex: bool
    is_flat: bool
    """Whether its tensors are flat pieces, or have the parameter's shape."""

    @property
    def num_elements(self) -> int:
        """Of the whole parameter."""
        return torch.Size(self.shape).numel() * (1 + self.is_complex)

    def elements(self, name: str, value: Any) -> Tensor | None:
        """Returns state that has one number per element, flat; None if it is of another kind."""
        if not isinstance(value, Tensor) or name == STEP:
            return None
        if self.is_flat:
            return value if value.shape == (self.end - self.start,) else None
        if value.shape != self.shape:
            return None
        return flat_elements(self._like_parameter(value.dtype), value)

    def shaped(self, flat: Tensor) -> Tensor:
        """Gives flat elements of the whole parameter its shape."""
        return view_like(self._like_parameter(flat.dtype), flat)

    def _like_parameter(self, dtype: torch.dtype) -> Tensor:
        if self.is_complex and not dtype.is_complex:
            dtype = dtype.to_complex()
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device="meta")


def save_shards(
    groups: Sequence[dict[str, Any]], parts: Iterable[ShardOptimizer]
) -> dict[str, Any]:
    """Returns this rank's state dictionary."""
    numbers = number_parameters(groups)
    state: dict[int, dict[str, Any]] = {}
    pieces: dict[int, dict[str, Any]] = {}
    for part in parts:
        for shard in part.shards:
            number = numbers[shard.parameter]
            is_flat = part.flat.partition is Partition.ELEMENTS
            piece = _piece(shard.parameter, shard.start, shard.end, is_flat=is_flat)
            pieces[number] = dataclasses.asdict(piece)
            if values := part.state_of(shard):
                state[number] = values
    return {"state": state, "param_groups": pack_groups(groups), _SHARDS: pieces}


def load_shards(
    groups: Sequence[dict[str, Any]],
    parts: Sequence[ShardOptimizer],
    states: Iterable[dict[str, Any]],
) -> None:
    """Gives the inner optimizers what saved states hold of this rank's shards."""
    numbers = number_parameters(groups)
    wanted = {
        numbers[shard.parameter]: ShardState(shard=shard, partition=part.flat.partition)
        for part in parts
        for shard in part.shards
    }
    saved_groups: list[dict[str, Any]] | None = None
    for saved in states:
        saved_groups = saved_groups or saved["param_groups"]
        for number, state in wanted.items():
            if (piece := _saved_piece(saved, number, state.shard.parameter)) is not None:
                state.take(saved["state"].get(number, {}), piece)
    if saved_groups is None:
        raise OptimizerStateError("no state was given to load")
    for number, state in wanted.items():
        state.require_all(number)
    load_options(groups, saved_groups)
    install(parts, {state.shard: state.finished() for state in wanted.values()})


def merge_shards(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Makes a state dictionary for torch's own optimizer from those that all ranks have saved.

    Args:
        states: What every rank's `state_dict()` returned, in any order.
    """
    merged: dict[int, dict[str, Any]] = {}
    pieces: dict[int, SavedPiece] = {}
    groups: list[dict[str, Any]] = []
    found: dict[int, int] = {}
    seen: set[tuple[int, int, int]] = set()
    for saved in states:
        groups = saved["param_groups"]
        for number, fields in saved[_SHARDS].items():
            piece = pieces[number] = SavedPiece(**fields)
            if (number, piece.start, piece.end) in seen:
                continue  # Replicas of a shard save the same piece.
            seen.add((number, piece.start, piece.end))
            found[number] = found.get(number, 0) + piece.end - piece.start
            target = merged.setdefault(number, {})
            for name, value in saved["state"].get(number, {}).items():
                if name == MASTER:
                    continue  # The optimizer would take it for state of its own.
                if (flat := piece.elements(name, value)) is None:
                    target[name] = copy.deepcopy(value)
                    continue
                if name not in target:
                    target[name] = torch.empty(piece.num_elements, dtype=flat.dtype)
                target[name][piece.start : piece.end] = flat
    for number, piece in pieces.items():
        if found[number] != piece.num_elements:
            raise OptimizerStateError(
                f"the states hold {found[number]} of {piece.num_elements} elements of parameter "
                f"{number}; give those of all ranks"
            )
        for name, value in merged[number].items():
            if isinstance(value, Tensor) and value.shape == (piece.num_elements,):
                merged[number][name] = value if name == STEP else piece.shaped(value)
    return {
        "state": {number: state for number, state in sorted(merged.items()) if state},
        "param_groups": groups,
    }


def number_parameters(groups: Sequence[dict[str, Any]]) -> dict[nn.Parameter, int]:
    """Numbers parameters as torch's state dictionaries do."""
    parameters = (parameter for group in groups for parameter in group["params"])
    return {parameter: number for number, parameter in enumerate(parameters)}


def pack_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns groups with numbers in place of their parameters."""
    numbers = number_parameters(groups)
    return [
        {**group, "params": [numbers[parameter] for parameter in group["params"]]}
        for group in groups
    ]


def _piece(parameter: nn.Parameter, start: int, end: int, *, is_flat: bool) -> SavedPiece:
    return SavedPiece(
        start=start,
        end=end,
        shape=tuple(parameter.shape),
        stride=parameter.stride(),
        is_complex=parameter.is_complex(),
        is_flat=is_flat,
    )


def load_options(groups: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    """Gives groups the options that were saved."""
    lengths = [len(group["params"]) for group in groups]
    saved_lengths = [len(group["params"]) for group in saved]
    if lengths != saved_lengths:
        raise OptimizerStateError(
            f"the optimizer's groups have {lengths} parameters, the saved ones {saved_lengths}; "
            "make the optimizer with the groups that it was saved with"
        )
    for group, options in zip(groups, saved, strict=True):
        group.update({name: v for name, v in options.items() if name not in NOT_OPTIONS})


@torch.no_grad()
def install(parts: Sequence[ShardOptimizer], states: Mapping[Shard, dict[str, Any]]) -> None:
    """Gives each shard its state, and its own value where it is more precise."""
    for part in parts:
        part.flat.refresh_master()
        own = {shard: dict(states[shard]) for shard in part.shards}
        for shard, state in own.items():
            if (master := state.pop(MASTER, None)) is not None and part.flat.has_master:
                shard.tensor.copy_(master)
        part.load_state(own)


def _saved_piece(saved: dict[str, Any], number: int, parameter: nn.Parameter) -> SavedPiece | None:
    """Returns which elements of a parameter a state is about; None if of none."""
    whole = _piece(parameter, 0, num_reals(parameter), is_flat=False)
    if _SHARDS not in saved:
        return whole
    if (fields := saved[_SHARDS].get(number)) is None:
        return None
    piece = SavedPiece(**fields)
    if (piece.shape, piece.stride) != (whole.shape, whole.stride):
        raise OptimizerStateError(
            f"parameter {number} was saved with shape {piece.shape} and strides {piece.stride}, "
            f"but has shape {whole.shape} and strides {whole.stride} now; load it into the same "
            "model"
        )
    return piece
