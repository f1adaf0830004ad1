"""Messages that own the memory they read and write until they are delivered.

Launching a message fills its receive buffers with NaN, so that reading them too early gives wrong
results. Delivery compares its send buffers with their contents at launch. References to memory are
weak: releasing or freeing a message's memory before delivery is a violation. A message never
reports completion.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.parallel.simulation.scheduler import ViolationError

Combine: TypeAlias = Callable[[list[list[Tensor]]], list[list[Tensor]]]
"""Maps the tensors that each rank sends to the tensors that each rank receives."""


class Region:
    """A weak reference to the memory of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = StorageWeakRef(storage)
        self._num_bytes = storage.nbytes()
        self._empty = tensor.data.new_empty(0)
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor | None:
        """Returns the tensor; None if its memory was released or freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.nbytes() < self._num_bytes:
            return None
        return self._empty.new_empty(0).set_(storage, *self._place)


@dataclasses.dataclass(kw_only=True)
class Side:
    """One rank's side of a message."""

    sent: list[Region]
    """Send buffers that must not change; storages that are also received into are excluded."""
    sent_values: list[Tensor]
    """Copies of everything that the rank sends, made at launch."""
    unchanged: list[Tensor]
    """The contents that `sent` must still have on delivery."""
    received: list[Region]


def launch_side(inputs: Sequence[Tensor], outputs: Sequence[Tensor], own: Tensor | None) -> Side:
    """Takes ownership of a rank's memory.

    Args:
        inputs: Send buffers.
        outputs: Receive buffers.
        own: The rank's own slice of the outputs in an in-place all-gather, which does not change.
    """
    values = [tensor.data.clone() for tensor in inputs]
    received_storages = {tensor.untyped_storage().data_ptr() for tensor in outputs}
    alone = [
        number
        for number, tensor in enumerate(inputs)
        if tensor.untyped_storage().data_ptr() not in received_storages
    ]
    targets = list(outputs)
    if own is not None:
        targets = [output for output in outputs if output.data_ptr() != own.data_ptr()]
    for tensor in targets:
        tensor.data.fill_(_poison(tensor))
    return Side(
        sent=[Region(inputs[number]) for number in alone],
        sent_values=values,
        unchanged=[values[number] for number in alone],
        received=[Region(tensor) for tensor in targets],
    )


class Message:
    """One collective of a group.

    Args:
        name: Description for error messages.
        ranks: Ranks of the group.
        combine: Computes what each rank receives.
    """

    def __init__(self, name: str, ranks: Sequence[int], combine: Combine) -> None:
        self.name = name
        self.ranks = ranks
        self.is_delivered = False
        self.sides: dict[int, Side] = {}
        self._combine = combine

    @property
    def is_launched(self) -> bool:
        """Whether all ranks have launched this message."""
        return len(self.sides) == len(self.ranks)

    def deliver(self) -> None:
        """Checks that no rank has touched the message's memory, and writes the receive buffers."""
        results = self._combine([self.sides[rank].sent_values for rank in self.ranks])
        for rank, of_rank in zip(self.ranks, results, strict=True):
            side = self.sides[rank]
            for region, before in zip(side.sent, side.unchanged, strict=True):
                current = self._require_alive(region, rank, "sends")
                if not torch.equal(current, before):
                    raise ViolationError(f"rank {rank} changed what {self.name} still sends")
            for number, region in enumerate(side.received):
                target = self._require_alive(region, rank, "receives into")
                if not _is_poisoned(target):
                    raise ViolationError(
                        f"rank {rank} wrote to what {self.name} still receives into"
                    )
                target.copy_(of_rank[number].reshape(target.shape))
        self.is_delivered = True
        self.sides.clear()

    def _require_alive(self, region: Region, rank: int, what: str) -> Tensor:
        tensor = region.tensor()
        if tensor is None:
            raise ViolationError(f"rank {rank} released memory that {self.name} still {what}")
        return tensor


def _poison(tensor: Tensor) -> float:
    return float("nan") if tensor.is_floating_point() else 77


def _is_poisoned(tensor: Tensor) -> bool:
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == 77).all())
