"""What saving and loading through torch.distributed.checkpoint share: planners, failures, dtypes.

The planners write JSON instead of pickle for values that are not tensors. torch gathers the
failures of all ranks, and raises them on every rank as a `CheckpointException`, which is not an
`Exception`; it becomes one of Paceline's errors, the same on all ranks.
"""

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from paceline.checkpoint.errors import CheckpointError, DamagedCheckpointError
from paceline.core.errors import PacelineError


class JsonSavePlanner(DefaultSavePlanner):
    """Plans like torch; writes values as JSON, and rejects by name those that JSON cannot hold."""

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        """Returns a tensor unchanged, and any other value as JSON."""
        if write_item.type is not WriteItemType.BYTE_IO:
            tensor: torch.Tensor = object
            return tensor
        return io.BytesIO(encode_json(object, write_item.index.fqn))


class JsonLoadPlanner(DefaultLoadPlanner):
    """Plans like torch; reads values from JSON."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Stores a value in the state."""
        parent: Any = self.original_state_dict
        *parents, last = self.mappings[read_item.dest_index.fqn]
        for key in parents:
            parent = parent[key]
        parent[last] = json.loads(value.getvalue())


def encode_json(value: Any, name: str) -> bytes:
    """Returns a value as JSON; raises unless decoding it gives an equal value."""
    try:
        text = json.dumps(value, allow_nan=False)
        is_kept = _same(json.loads(text), value)
    except (TypeError, ValueError, RecursionError):
        is_kept = False
    if not is_kept:
        raise CheckpointError(
            f"{name}: a checkpoint can contain tensors and JSON values, not {_brief(value)}; "
            "convert it before saving"
        )
    return text.encode()


def _same(loaded: Any, value: Any) -> bool:
    if isinstance(value, dict) and isinstance(loaded, dict):
        return loaded.keys() == value.keys() and all(_same(loaded[k], value[k]) for k in value)
    if isinstance(value, list) and isinstance(loaded, list):
        return len(loaded) == len(value) and all(map(_same, loaded, value))
    return type(loaded) is type(value) and bool(loaded == value)


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "nested too deeply to be shown"
    return f"a {type(value).__name__} ({text[:60]}{'...' if len(text) > 60 else ''})"


@contextlib.contextmanager
def named_failures(what: str) -> Iterator[None]:
    """Raises a `CheckpointError` for anything that failed inside on any rank."""
    try:
        if dist.is_initialized():
            yield
        else:
            with warnings.catch_warnings():
                # Without a process group, torch warns that it assumes a single process.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
    except CheckpointException as error:
        raise _translate(what, error) from None


def _translate(what: str, error: CheckpointException) -> CheckpointError:
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    # Damage comes last: other failures would also occur with an older checkpoint.
    for kind in (CheckpointError, DamagedCheckpointError):
        for rank, failure in failures.items():
            if type(failure) is kind:
                return kind(f"{what}: rank {rank}: {failure}")
    rank, failure = next(iter(failures.items()))
    if isinstance(failure, PacelineError):
        return CheckpointError(f"{what}: rank {rank}: {failure}")
    return CheckpointError(
        f"{what}: rank {rank}: {type(failure).__name__}: {failure}; is it a checkpoint of another "
        "model or optimizer?"
        if isinstance(failure, (RuntimeError, ValueError, KeyError))
        else f"{what}: rank {rank}: {type(failure).__name__}: {failure}"
    )


_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype, tensor_name: str) -> str:
    """Returns the safetensors name of a dtype."""
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{tensor_name}: safetensors does not support {dtype}; convert the tensor before saving"
        )
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype with a safetensors name."""
    return _DTYPES[name]


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU."""
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)
