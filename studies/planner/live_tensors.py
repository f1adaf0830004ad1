"""What is alive on an accelerator when its memory is at its peak, by the line that allocated it."""

import collections
import gc
import traceback
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from paceline.devices import accelerator
from paceline.parallel.dtensor import local_tensor

_PLACES = ("paceline/", "torch/distributed", "torch/optim", "torch/nn/utils")
_INNERMOST = 2


class _Seen(NamedTuple):
    storage: StorageWeakRef
    num_bytes: int
    what: str


class LiveTensors(TorchDispatchMode):
    """Follows the tensors of a device while it is entered; also those of autograd's threads."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._known: dict[int, _Seen] = {}
        self._peak = 0
        self._at_peak = ""
        gc.collect()
        for item in gc.get_objects():
            if issubclass(type(item), Tensor):
                self._see(local_tensor(item), "before the step")

    def __torch_dispatch__(
        self, function: Any, _types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        """Runs an operator, and looks at what is alive if it has raised the peak."""
        result = function(*arguments, **(keywords or {}))
        line = _line()
        for tensor in tree_iter((arguments, keywords)):
            self._see(tensor, "an argument")
        for tensor in tree_iter(result):
            self._see(tensor, f"{function} {line}")
        peak = accelerator.peak_allocated_bytes(self._device)
        if peak > self._peak:
            self._peak = peak
            self._at_peak = self._describe(f"{function} {line}")
        return result

    def at_peak(self) -> str:
        """Returns the operator at which memory was at its peak, and what was alive then."""
        return self._at_peak

    def _see(self, tensor: Any, what: str) -> None:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device != self._device:
            return
        storage = tensor.untyped_storage()
        before = self._known.get(storage._cdata)
        if storage.nbytes() == 0 or (before is not None and not before.storage.expired()):
            return
        text = f"{tuple(tensor.shape)} {tensor.dtype}, {what}"
        self._known[storage._cdata] = _Seen(StorageWeakRef(storage), storage.nbytes(), text)

    def _describe(self, operator: str) -> str:
        sizes: collections.Counter[str] = collections.Counter()
        numbers: collections.Counter[str] = collections.Counter()
        for seen in self._known.values():
            if not seen.storage.expired():
                sizes[seen.what] += seen.num_bytes
                numbers[seen.what] += 1
        lines = [f"{self._peak:,} bytes at {operator}"]
        lines += [f"{size:>14,} in {numbers[what]} of {what}" for what, size in sizes.items()]
        return "\n".join(lines)


def _line() -> str:
    """Returns the innermost lines of this package's and torch's Python code."""
    frames = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        for frame in reversed(traceback.extract_stack()[:-2])
        if any(place in frame.filename for place in _PLACES)
    ]
    return " < ".join(frames[:_INNERMOST])
