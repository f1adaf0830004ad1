"""A sharded optimizer's full state, in the format of torch's own optimizers.

Parameters are numbered as in torch: consecutively over all groups. State with one number per
element of a parameter is sharded like the parameter. All other state, such as the step count, is
equal for all shards of a parameter.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.parallel.buckets import num_reals, view_like
from paceline.parallel.zero.flat_parameters import Shard, flat_elements
from paceline.parallel.zero.shard_optimizer import (
    MASTER,
    NOT_OPTIONS,
    STEP,
    ChangedOption,
    ShardOptimizer,
    values_differ,
)


class OptimizerStateError(PacelineError):
    """A saved state does not fit the optimizer; the message names the difference."""


_Entry: TypeAlias = tuple[int, str, int | None, Any]
"""A parameter's number, a key of its state, the start of the shard, and the shard's elements.

For state that is not sharded with the parameter, None and the state itself instead.
"""


def gather_full_state(
    groups: Sequence[dict[str, Any]], parts: Sequence[ShardOptimizer], *, on_all_ranks: bool = False
) -> dict[str, Any]:
    """Returns the state dictionary of torch's own optimizer on the first rank, else an empty one.

    Gathers one bucket at a time, so no rank holds more than the result and one bucket.

    With `on_all_ranks`, all ranks get the state, on their own devices.
    """
    require_same_options(parts)
    numbers = number_parameters(groups)
    full: dict[int, dict[str, Any]] = {number: {} for number in numbers.values()}
    for part in parts:
        group = part.group.get()
        entries = list(_entries(part, numbers))
        parameters = {numbers[p]: p for flat in part.flats for p in flat.parameters if p in numbers}
        gathered: Any = [None] * group.size() if on_all_ranks or group.rank() == 0 else None
        if on_all_ranks:
            dist.all_gather_object(gathered, entries, group=group)
        else:
            dist.gather_object(entries, gathered, group=group, group_dst=0)
        _merge(full, gathered or [], parameters)
        if on_all_ranks:
            for number, parameter in parameters.items():
                full[number] = {
                    key: value.to(parameter.device)
                    if isinstance(value, Tensor) and value.dim()
                    else value
                    for key, value in full[number].items()
                }
    if not on_all_ranks and any(part.group.get().rank() != 0 for part in parts):
        return {}
    return {
        "state": {number: state for number, state in full.items() if state},
        "param_groups": pack_groups(groups),
    }


def _entries(part: ShardOptimizer, numbers: Mapping[nn.Parameter, int]) -> Iterator[_Entry]:
    for shard in part.shards:
        number = numbers[shard.parameter]
        for key, value in part.state_of(shard).items():
            if key == MASTER:
                continue  # torch's optimizer would treat it as part of its own state.
            if (elements := elements_of(shard, key, value)) is not None:
                # Copies: pickling a slice would include the whole tensor.
                yield number, key, shard.start, elements.detach().clone().cpu()
            else:
                yield number, key, None, value.cpu() if isinstance(value, Tensor) else value


def _merge(
    full: dict[int, dict[str, Any]],
    gathered: Iterable[Iterable[_Entry]],
    parameters: Mapping[int, nn.Parameter],
) -> None:
    flat: dict[tuple[int, str], Tensor] = {}
    for number, key, start, value in itertools.chain.from_iterable(gathered):
        if start is None:
            full[number][key] = value
            continue
        parameter = parameters[number]
        if (number, key) not in flat:
            flat[number, key] = torch.empty(num_reals(parameter), dtype=value.dtype)
            full[number][key] = view_like(parameter, flat[number, key])
        flat[number, key][start : start + value.numel()] = value


def load_full_state(
    groups: Sequence[dict[str, Any]], parts: Sequence[ShardOptimizer], saved: dict[str, Any]
) -> None:
    """Loads this rank's shards from a state dictionary of torch's own optimizer."""
    load_options(groups, saved["param_groups"])
    # torch.distributed.checkpoint uses names instead of numbers, so match by order.
    saved_numbers = (number for group in saved["param_groups"] for number in group["params"])
    numbers = dict(zip(number_parameters(groups), saved_numbers, strict=True))
    install(
        parts,
        {
            shard: {
                key: _cut(shard, key, value)
                for key, value in saved["state"].get(numbers[shard.parameter], {}).items()
            }
            for part in parts
            for shard in part.shards
        },
    )


def _cut(shard: Shard, key: str, value: Any) -> Any:
    """Returns a copy of a shard's part of a parameter's state: optimizers modify it in place."""
    is_cut = isinstance(value, Tensor) and value.shape == shard.parameter.shape and key != STEP
    if not is_cut:
        return copy.deepcopy(value)
    elements = flat_elements(shard.parameter, value)[shard.start : shard.end]
    return shaped(shard, elements.clone())


def elements_of(shard: Shard, key: str, value: Any) -> Tensor | None:
    """Returns a shard's per-element state, flattened; None for other state."""
    if key == STEP or not isinstance(value, Tensor) or value.shape != shard.tensor.shape:
        return None
    return flat_elements(shard.parameter, value) if shard.is_whole else value


def shaped(shard: Shard, elements: Tensor) -> Tensor:
    """Returns a shard's elements in the shape that its optimizer uses."""
    return view_like(shard.parameter, elements) if shard.is_whole else elements


def number_parameters(groups: Sequence[dict[str, Any]]) -> dict[nn.Parameter, int]:
    """Returns the number of each parameter in torch's state dictionaries."""
    parameters = (parameter for group in groups for parameter in group["params"])
    return {parameter: number for number, parameter in enumerate(parameters)}


def pack_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns groups with numbers instead of parameters."""
    numbers = number_parameters(groups)
    return [
        {**group, "params": [numbers[parameter] for parameter in group["params"]]}
        for group in groups
    ]


def load_options(
    groups: Sequence[dict[str, Any]],
    saved: Sequence[dict[str, Any]],
    lengths: Sequence[int] | None = None,
) -> None:
    """Loads saved options into groups.

    `lengths` are the groups' numbers of parameters, if this rank has only some of them.
    """
    lengths = [len(group["params"]) for group in groups] if lengths is None else lengths
    saved_lengths = [len(group["params"]) for group in saved]
    if lengths != saved_lengths:
        raise OptimizerStateError(
            f"the optimizer's groups have {lengths} parameters, the saved ones {saved_lengths}; "
            "create the optimizer with the groups that it was saved with"
        )
    for group, options in zip(groups, saved, strict=True):
        group.update({name: v for name, v in options.items() if name not in NOT_OPTIONS})


@torch.no_grad()
def install(parts: Sequence[ShardOptimizer], states: Mapping[Shard, dict[str, Any]]) -> None:
    """Loads the state of each shard, and its master copy if it has one."""
    for part in parts:
        for flat in part.flats:
            flat.refresh_master()
        own = {shard: dict(states[shard]) for shard in part.shards}
        for shard, state in own.items():
            if (master := state.pop(MASTER, None)) is not None and part.has_master(shard):
                shard.tensor.copy_(master)
        part.load_state(own)


def take_over_options(parts: Sequence[ShardOptimizer]) -> None:
    """Copies options that the inner optimizers have changed to the groups of whole parameters.

    Some optimizers count steps or keep estimates in their groups. Values on which the inner
    optimizers disagree are not copied.
    """
    for changes in _changes(parts):
        if not any(values_differ(change.value, changes[0].value) for change in changes):
            for change in changes:
                change.take_over()


def require_same_options(parts: Sequence[ShardOptimizer]) -> None:
    """Raises if inner optimizers have changed an option of one group to different values."""
    take_over_options(parts)
    for changes in _changes(parts):
        name, values = changes[0].name, {repr(change.value) for change in changes}
        raise OptimizerStateError(
            f"the optimizer keeps {name!r} in its groups, and has computed "
            f"{', '.join(sorted(values))} for shards of one group: this optimizer cannot be "
            "sharded, and its full state cannot be saved"
        )


def _changes(parts: Sequence[ShardOptimizer]) -> list[list[ChangedOption]]:
    found: dict[tuple[int, str], list[ChangedOption]] = {}
    for part in parts:
        for change in part.changed_options():
            found.setdefault((id(change.outer), change.name), []).append(change)
    return list(found.values())
