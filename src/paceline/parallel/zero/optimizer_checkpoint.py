"""Saves and loads a sharded optimizer's state with torch.distributed.checkpoint.

On saving, every rank writes its own shards; a parameter's shards form one flat tensor in the
checkpoint, under the parameter's name. On loading, a rank finds the state of its shards in the
checkpoint's metadata and reads only these elements, regardless of the ranks that wrote them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from paceline.parallel.buckets import num_reals
from paceline.parallel.ranks.collectives import from_all
from paceline.parallel.zero.flat_parameters import Shard
from paceline.parallel.zero.optimizer_state import (
    OptimizerStateError,
    elements_of,
    install,
    load_options,
    number_parameters,
    pack_groups,
    require_same_options,
    shaped,
)
from paceline.parallel.zero.shard_optimizer import STEP, ShardOptimizer

_STATE = "state"
_GROUPS = "param_groups"
_LAYOUT = "layout"
_LIST = "list"


class FlatPiece(Tensor):
    """A slice of a flat tensor whose other elements are on other ranks.

    torch.distributed.checkpoint calls the dunder methods below to locate the slice.
    """

    start: int
    total: int

    @staticmethod
    def of(tensor: Tensor, start: int, total: int) -> "FlatPiece":
        """Returns a tensor as a slice at `start` of a tensor of `total` elements; shares memory."""
        piece = tensor.detach().as_subclass(FlatPiece)
        piece.start, piece.total = start, total
        return piece

    def size(self) -> torch.Size:  # type: ignore[override]
        """Returns the size of the whole tensor, as stored in the checkpoint."""
        return torch.Size([self.total])

    def __create_write_items__(self, name: str, _object: object) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self._plain()),
                    size=self.size(),
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size([self.start]), sizes=torch.Size([self.numel()]))
        ]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self._plain()

    def _plain(self) -> Tensor:
        return self.as_subclass(Tensor)


def checkpoint_state(
    groups: Sequence[dict[str, Any]], parts: Sequence[ShardOptimizer], model: nn.Module
) -> dict[str, Any]:
    """Returns the state that this rank must save, by the model's parameter names."""
    require_same_options(parts)
    names = parameter_names(groups, model)
    state: dict[str, Any] = {}
    for part in parts:
        for shard in part.shards:
            for key, value in part.state_of(shard).items():
                elements = elements_of(shard, key, value)
                state[f"{_STATE}.{names[shard.parameter]}.{key}"] = (
                    value if elements is None else _piece(shard, elements)
                )
    return {**state, **describe(groups, names)}


def describe(
    groups: Sequence[dict[str, Any]],
    names: dict[nn.Parameter, str],
    stages: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Returns the checkpoint entries of an optimizer other than its state: options and layouts.

    If a pipeline divides the model, `stages` are the ranks that hold the other parameters.
    """
    layout = {name: _layout(parameter) for parameter, name in names.items()}
    packed = pack_groups(groups)
    if stages is not None:
        for group, size in zip(packed, _joint_lengths(groups, names, stages), strict=True):
            group["params"] = list(range(size))
        layout = {name: each for part in from_all(layout, stages) for name, each in part.items()}
    # As text, because the checkpoint would flatten lists. A learning rate may be a tensor.
    options = json.dumps(
        [_pack_lists(group) for group in packed], default=lambda value: value.item()
    )
    return {_GROUPS: options, _LAYOUT: json.dumps(layout)}


def load_checkpoint(
    groups: Sequence[dict[str, Any]],
    parts: Sequence[ShardOptimizer],
    model: nn.Module,
    reader: StorageReader,
    prefix: str,
    group: dist.ProcessGroup | None,
    planner: LoadPlanner | None = None,
) -> None:
    """Reads the state of this rank's shards, and loads it into the inner optimizers."""
    names = parameter_names(groups, model)
    saved = reader.read_metadata().state_dict_metadata
    keys = saved_keys(saved, prefix, names.values())
    wanted: dict[str, Any] = {}
    found: dict[Shard, dict[str, str]] = {}
    for shard in (shard for part in parts for shard in part.shards):
        found[shard] = keys[names[shard.parameter]]
        for key, full_name in found[shard].items():
            wanted[full_name] = _room_for(saved[full_name], shard, key)
    load_entries(wanted, groups, names, reader, prefix, group, planner)
    states = {
        shard: {key: _loaded(shard, wanted[full_name]) for key, full_name in full_names.items()}
        for shard, full_names in found.items()
    }
    install(parts, states)


def saved_keys(
    saved: Mapping[str, Any], prefix: str, names: Iterable[str]
) -> dict[str, dict[str, str]]:
    """Returns, for each parameter, the names of its checkpoint entries by state key."""
    if f"{prefix}.{_GROUPS}" not in saved:
        raise OptimizerStateError(
            f"the checkpoint has no sharded optimizer under {prefix!r}; its first entries are "
            f"{', '.join(list(saved)[:3])}"
        )
    keys: dict[str, dict[str, str]] = {name: {} for name in names}
    for full_name in saved:
        name, _, key = full_name.rpartition(".")
        if (of_state := name.removeprefix(f"{prefix}.{_STATE}.")) != name and of_state in keys:
            keys[of_state][key] = full_name
    return keys


def load_entries(
    wanted: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    names: dict[nn.Parameter, str],
    reader: StorageReader,
    prefix: str,
    group: dist.ProcessGroup | None,
    planner: LoadPlanner | None,
    stages: dist.ProcessGroup | None = None,
) -> None:
    """Reads checkpoint entries and the groups' options; raises if parameter layouts differ."""
    groups_name, layout_name = f"{prefix}.{_GROUPS}", f"{prefix}.{_LAYOUT}"
    wanted |= {groups_name: None, layout_name: None}
    load(wanted, storage_reader=reader, process_group=group, planner=planner)
    _require_layout(names, _decoded(wanted[layout_name], layout_name, dict))
    lengths = None if stages is None else _joint_lengths(groups, names, stages)
    load_options(groups, _saved_groups(wanted[groups_name], groups_name), lengths)


def _saved_groups(text: Any, name: str) -> list[dict[str, Any]]:
    """Decodes the options of groups; raises unless each has a list of parameters."""
    groups = _decoded(text, name, list)
    if not all(isinstance(group, dict) for group in groups):
        raise _damaged(name, "a group is no table of options")
    unpacked = [{key: _unpack(value) for key, value in group.items()} for group in groups]
    if not all(isinstance(group.get("params"), list) for group in unpacked):
        raise _damaged(name, "a group has no list of parameters")
    return unpacked


def _decoded(text: Any, name: str, kind: type) -> Any:
    """Decodes an entry of a checkpoint, which may come from elsewhere; raises unless it fits."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(name, str(error)) from error
    if not isinstance(value, kind):
        raise _damaged(name, f"it is no {kind.__name__}")
    return value


def _damaged(name: str, what: str) -> OptimizerStateError:
    return OptimizerStateError(
        f"the checkpoint's entry {name!r} is damaged: {what}; load an older checkpoint"
    )


def _joint_lengths(
    groups: Sequence[dict[str, Any]], names: dict[nn.Parameter, str], stages: dist.ProcessGroup
) -> list[int]:
    """Returns each group's number of parameters over all stages; copies count once."""
    own = [[names[parameter] for parameter in group["params"]] for group in groups]
    return [len(set().union(*same)) for same in zip(*from_all(own, stages), strict=True)]


def _pack_lists(group: dict[str, Any]) -> dict[str, Any]:
    """Marks lists, which JSON does not distinguish from tuples such as betas."""
    return {
        name: {_LIST: value} if isinstance(value, list) else value for name, value in group.items()
    }


def _unpack(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_LIST}:
        return value[_LIST]
    return tuple(value) if isinstance(value, list) else value


def _layout(parameter: nn.Parameter) -> list[list[int]]:
    """Returns shape and strides: state is saved in the parameter's memory order."""
    return [list(parameter.shape), list(parameter.stride())]


def _require_layout(names: dict[nn.Parameter, str], saved: dict[str, Any]) -> None:
    for parameter, name in names.items():
        if name not in saved:
            raise OptimizerStateError(
                f"the checkpoint has no parameter {name!r}, but {', '.join(list(saved)[:3])} and "
                "others; give the model that was saved, under the same names"
            )
        if saved[name] != _layout(parameter):
            raise OptimizerStateError(
                f"parameter {name!r} was saved with shape and strides {saved[name]}, and has "
                f"{_layout(parameter)} now; load it into the same model"
            )


def parameter_names(groups: Sequence[dict[str, Any]], model: nn.Module) -> dict[nn.Parameter, str]:
    """Returns the names of the optimizer's parameters in the model inside any container."""
    inner = getattr(model, "module", None)
    model = inner if isinstance(inner, nn.Module) else model
    known = {parameter: name for name, parameter in model.named_parameters()}
    numbers = number_parameters(groups)
    for parameter, number in numbers.items():
        if parameter not in known:
            raise OptimizerStateError(
                f"parameter {number} of the optimizer is not a parameter of the model; give the "
                "model that the optimizer was made for"
            )
    return {parameter: known[parameter] for parameter in numbers}


def _piece(shard: Shard, elements: Tensor) -> FlatPiece:
    return FlatPiece.of(elements, shard.start, num_reals(shard.parameter))


def _room_for(saved: Any, shard: Shard, key: str) -> Any:
    """Returns the object into which an entry is read; None for an entry that is not a tensor."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    dtype = saved.properties.dtype
    if key == STEP or saved.size != (num_reals(shard.parameter),):
        return torch.empty(saved.size, dtype=dtype)
    return _piece(shard, torch.empty(shard.end - shard.start, dtype=dtype))


def _loaded(shard: Shard, value: Any) -> Any:
    return shaped(shard, value.as_subclass(Tensor)) if isinstance(value, FlatPiece) else value
