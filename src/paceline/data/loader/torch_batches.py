"""Batches as tensors. The only module of data/ that imports torch.

For an accelerator, batches are read into pinned memory and copied while the device computes.
torch's pinned-memory allocator does not reuse a block before the copies queued from it are done.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data.loader.batches import Allocate, Batch
from paceline.data.loader.config import LoaderConfig
from paceline.data.loader.loader import TokenLoader
from paceline.devices.accelerator import pins_memory


class TorchBatch(NamedTuple):
    """The sequences of one rank in one step, in a form that torch's DataLoader can pin and move."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None
    document_ids: torch.Tensor | None
    step: int
    first_sample: int
    digest: int | None


def to_torch(batch: Batch, device: torch.device | str = "cpu") -> TorchBatch:
    """Returns a batch's tensors on a device; the host does not wait for the copies."""
    # Tokens and targets overlap, so one copy of the rows serves both.
    rows = torch.from_numpy(batch.rows).to(device, non_blocking=True)
    return TorchBatch(
        tokens=rows[:, :-1],
        targets=rows[:, 1:],
        positions=_optional(batch.positions, device),
        document_ids=_optional(batch.document_ids, device),
        step=batch.step,
        first_sample=batch.first_sample,
        digest=batch.digest,
    )


class TorchLoader:
    """An endless iterator over the batches of one rank, on its device.

    Args:
        config: The datasets, their order and the batch.
        device: Device of the tensors.
        rank: Rank of this process among those that share each batch.
        world_size: Number of ranks.
    """

    def __init__(
        self,
        config: LoaderConfig,
        *,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._device = torch.device(device)
        self._loader = TokenLoader(
            config, rank=rank, world_size=world_size, allocate=_allocate_for(self._device)
        )

    def __iter__(self) -> Iterator[TorchBatch]:
        return self

    def __next__(self) -> TorchBatch:
        return to_torch(next(self._loader), self._device)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the stream after the batches returned so far."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from the `state` of a loader of any world size and batch size."""
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """Ends the prefetch thread and releases all files."""
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TokenDataset(IterableDataset[TorchBatch]):
    """Whole batches for torch's DataLoader or torchdata's StatefulDataLoader, with batch_size=None.

    Workers alternate: of n workers, worker k reads batches k, k + n, ..., and the DataLoader takes
    one batch from each in turn, so the order is the same for any number of workers.

    Args:
        config: The datasets, their order and the batch.
        rank: Rank of this process among those that share each batch.
        world_size: Number of ranks.
    """

    def __init__(self, config: LoaderConfig, *, rank: int = 0, world_size: int = 1) -> None:
        self._config = config
        self._rank, self._world_size = rank, world_size
        self._state: Mapping[str, Any] | None = None
        self._is_own_state = False
        self._loader: TokenLoader | None = None

    def __iter__(self) -> Iterator[TorchBatch]:
        worker = get_worker_info()
        every, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        with TokenLoader(
            self._config, rank=self._rank, world_size=self._world_size, every=every
        ) as loader:
            if self._state is not None:
                loader.load_state_dict(self._state)
            if not self._is_own_state:
                loader.skip(first)
            self._loader = loader
            for batch in loader:
                yield to_torch(batch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this process or worker in the stream."""
        if self._loader is not None:
            return self._loader.state_dict()
        return dict(self._state or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iterator resume from `state`; in a worker, with that worker's batches."""
        self._state = state or None
        self._is_own_state = get_worker_info() is not None
        self._loader = None


def _optional(
    array: npt.NDArray[np.int64] | None, device: torch.device | str
) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array).to(device, non_blocking=True)


def _allocate_for(device: torch.device) -> Allocate | None:
    if not pins_memory(device):
        return None

    def allocate(shape: tuple[int, int]) -> npt.NDArray[np.int64]:
        pinned: npt.NDArray[np.int64] = torch.empty(
            shape, dtype=torch.int64, pin_memory=True
        ).numpy()
        return pinned

    return allocate
