"""State of a model, its optimizers and its generators in a checkpoint, for any strategy.

Optimizer state has one format for all optimizers. State with one number per element of a parameter
is saved flat, under the parameter's name. Each rank holds a range of it: all of it for a replicated
parameter, rows of it for a DTensor, and any elements of it in a `ShardedOptimizer`, which defines
this format. Where tensor-parallel ranks split the rows of a matrix, they exchange state until each
has whole rows.
"""

import base64
import math
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from paceline.checkpoint.dcp import JsonLoadPlanner, named_failures
from paceline.checkpoint.errors import REMEDY, CheckpointError
from paceline.checkpoint.format import Json
from paceline.checkpoint.residuals import load_residuals, residual_state
from paceline.checkpoint.restore import Source
from paceline.devices import accelerator
from paceline.parallel.buckets import num_reals, view_like
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.zero.flat_parameters import flat_elements
from paceline.parallel.zero.optimizer import ShardedOptimizer
from paceline.parallel.zero.optimizer_checkpoint import (
    FlatPiece,
    describe,
    load_entries,
    parameter_names,
    saved_keys,
)
from paceline.parallel.zero.optimizer_state import OptimizerStateError
from paceline.parallel.zero.shard_optimizer import MASTER, STEP


def optimizer_state(
    optimizer: Optimizer, model: nn.Module, stages: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Returns the state of an optimizer that this rank saves."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.checkpoint_state(model)
    _require_supported(optimizer)
    names = parameter_names(optimizer.param_groups, model)
    state = {
        f"state.{name}.{key}": _saved(parameter, name, key, value)
        for parameter, name in names.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return {**state, **describe(optimizer.param_groups, names, stages)}


def load_optimizer_state(
    optimizer: Optimizer,
    model: nn.Module,
    source: Source,
    prefix: str,
    stages: dist.ProcessGroup | None = None,
) -> None:
    """Loads an optimizer's state from a checkpoint, regardless of which optimizer saved it.

    All ranks must call it.
    """
    what = f"loading {source.checkpoint.storage.url}"
    try:
        with named_failures(what):
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.load_checkpoint(model, source.reader, prefix, JsonLoadPlanner())
            else:
                _require_supported(optimizer)
                _load_whole(optimizer, model, source, prefix, stages)
    except OptimizerStateError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except KeyError as error:  # torch's optimizers look entries up.
        raise CheckpointError(f"{what}: the optimizer's state lacks {error}; {REMEDY}") from error


def _load_whole(
    optimizer: Optimizer,
    model: nn.Module,
    source: Source,
    prefix: str,
    stages: dist.ProcessGroup | None,
) -> None:
    groups = optimizer.param_groups
    names = parameter_names(groups, model)
    saved = source.reader.read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {}
    values: dict[nn.Parameter, dict[str, Any]] = {}
    keys = saved_keys(saved, prefix, names.values())
    for parameter, name in names.items():
        values[parameter] = {}
        for key, full_name in keys[name].items():
            if key == MASTER:
                continue  # Higher-precision copy of the parameter, which this optimizer lacks.
            value, room = _room_for(parameter, key, saved[full_name])
            values[parameter][key], wanted[full_name] = value, room
    planner = JsonLoadPlanner()
    load_entries(wanted, groups, names, source.reader, prefix, source.group, planner, stages)
    state = {
        number: {
            key: wanted[keys[name][key]] if value is None else _placed(value, parameter)
            for key, value in values[parameter].items()
        }
        for number, (parameter, name) in enumerate(names.items())
        if values[parameter]
    }
    # torch moves it to the parameters' device and dtype, like any state.
    own_groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": own_groups})


def _saved(parameter: nn.Parameter, name: str, key: str, value: Any) -> Any:
    """Returns an entry of a parameter's state in the format of the checkpoint."""
    if not isinstance(value, Tensor):
        return value
    if key == STEP or value.shape != parameter.shape:
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"{name}: the optimizer keeps {key!r} of shape {tuple(value.shape)} for this "
                f"sharded parameter of shape {tuple(parameter.shape)}, which cannot be saved for "
                "other numbers of ranks; use an elementwise optimizer such as AdamW"
            )
        return value
    if isinstance(value, DTensor) and _has_columns(value):
        value = value.redistribute(placements=_rows(value))
        return FlatPiece.of(local_tensor(value).flatten(), *_range(value, name))
    start, total = _range(parameter, name)
    return FlatPiece.of(flat_elements(local_tensor(parameter), local_tensor(value)), start, total)


def _room_for(parameter: nn.Parameter, key: str, saved: Any) -> tuple[Any, Any]:
    """Returns a parameter's state for a key, and the buffer to read the saved entry into.

    Both are None if the entry is not a tensor: then its value is used as read.
    """
    if not isinstance(saved, TensorStorageMetadata):
        return None, None
    dtype = saved.properties.dtype
    if key == STEP or saved.size != (num_reals(parameter),):
        room = torch.empty(saved.size, dtype=dtype)
        return room, room
    if isinstance(parameter, DTensor) and _has_columns(parameter):
        rows = empty_dtensor(
            parameter.shape,
            dtype=dtype,
            device_mesh=parameter.device_mesh,
            placements=_rows(parameter),
        )
        return rows, FlatPiece.of(local_tensor(rows).flatten(), *_range(rows, key))
    own = local_tensor(parameter)
    flat = torch.empty(num_reals(own), dtype=dtype, device=own.device)
    value = view_like(own, flat)
    if isinstance(parameter, DTensor):
        value = DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return value, FlatPiece.of(flat, *_range(parameter, key))


def _has_columns(tensor: DTensor) -> bool:
    """Returns whether ranks have parts of rows, as in matrices that are split by columns."""
    return any(getattr(each, "dim", 0) != 0 for each in tensor.placements)


def _rows(tensor: DTensor) -> list[Placement]:
    """Returns placements with whole rows instead: a flat piece of a matrix is one range."""
    return [each if each.is_replicate() else Shard(0) for each in tensor.placements]


def _placed(value: Any, parameter: nn.Parameter) -> Any:
    """Returns state that was read by rows, redistributed like its parameter."""
    if isinstance(value, DTensor) and isinstance(parameter, DTensor):
        return value.redistribute(placements=parameter.placements)
    return value


def _range(parameter: Tensor, name: str) -> tuple[int, int]:
    """Returns the start of this rank's elements in the flat parameter, and its total size."""
    if not isinstance(parameter, DTensor):
        return 0, num_reals(parameter)
    (chunk,) = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if chunk.sizes[1:] != parameter.shape[1:]:
        raise CheckpointError(
            f"{name}: is sharded as {parameter.placements}; only parameters sharded by rows can "
            "be saved for other numbers of ranks"
        )
    row = math.prod(parameter.shape[1:]) * (1 + parameter.is_complex())
    return (chunk.offsets[0] * row if parameter.dim() else 0), num_reals(parameter)


def _require_supported(optimizer: Optimizer) -> None:
    # By name: importing the class would be a sixth of everything that a rank imports.
    if any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__):
        raise CheckpointError(
            "torch's ZeroRedundancyOptimizer keeps its state where a checkpoint cannot reach it; "
            "use the strategy 'zero1'"
        )


MODEL = "model"
"""Key of the model's tensors in a checkpoint."""
_OPTIMIZER = "optimizer"


def training_state(
    model: nn.Module, optimizers: Mapping[str, Optimizer], stages: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Returns the state that this rank saves; all ranks must call it.

    Args:
        model: Plain, or wrapped by any strategy.
        optimizers: Optimizers by their names in the checkpoint.
        stages: Process group of the ranks with the other parameters, if a pipeline splits them.
    """
    return {
        **residual_state(model),
        MODEL: get_model_state_dict(model),
        _OPTIMIZER: {
            name: optimizer_state(optimizer, model, stages)
            for name, optimizer in optimizers.items()
        },
    }


def load_training_state(
    source: Source,
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    stages: dist.ProcessGroup | None = None,
) -> None:
    """Loads a model and its optimizers from a checkpoint; all ranks must call it.

    Args:
        source: The checkpoint, saved with any world size and strategy.
        model: Plain, or wrapped by any strategy.
        optimizers: Optimizers by their names in the checkpoint.
        stages: Process group of the ranks with the other parameters, if a pipeline splits them.
    """
    state = {MODEL: get_model_state_dict(model)}
    source.load(state)
    set_model_state_dict(model, state[MODEL])
    # After the parameters: a sharded optimizer may keep a copy of them.
    for name, optimizer in optimizers.items():
        load_optimizer_state(optimizer, model, source, f"{_OPTIMIZER}.{name}", stages)
    load_residuals(source, model)


def capture_random_state(device: torch.device) -> Json:
    """Returns the state of every generator that training on a device may draw from."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
        "python": [version, _encode(np.array(words, np.uint32).tobytes()), gauss],
        "numpy": [
            str(name),
            _encode(np.asarray(keys, np.uint32).tobytes()),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if (of_device := accelerator.random_state(device)) is not None:
        state[device.type] = _encode(of_device)
    return state


def restore_random_state(state: Json, device: torch.device) -> None:
    """Restores the state of every generator; that of a device only on one of its type."""
    torch.set_rng_state(_tensor(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(_decode(words), np.uint32).tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(
        (name, np.frombuffer(_decode(keys), np.uint32), position, has_gauss, cached)
    )
    if device.type in state:
        accelerator.set_random_state(device, _decode(state[device.type]))


def _encode(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


def _decode(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)
