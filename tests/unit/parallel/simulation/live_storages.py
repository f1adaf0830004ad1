"""Measures the peak memory that a pass allocates."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Tracks storages that are allocated in its context.

    Args:
        at_least: Storages with fewer bytes, such as activations of one token, are not counted.
    """

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._at_least = at_least
        self._older: set[StorageWeakRef] = set()
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._older.add(StorageWeakRef(tensor.untyped_storage()))
        output = func(*args, **kwargs)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self._older and storage.nbytes() >= self._at_least:
                    self._live[reference] = storage.nbytes()
        self._older.difference_update([ref for ref in self._older if ref.expired()])
        self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return output
