"""Batches for replicas that come and go: the position advances with committed steps only.

What a replica reads depends on who takes part in the step. A step that does not count, or other
members in the next one, throw away what was read ahead, and the samples are read again by whoever
is there: each is trained on exactly once.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import torch

from paceline.data.loader.torch_batches import TorchBatch, TorchLoader
from paceline.parallel.elastic.members import Members
from paceline.training.config import RunConfig


class ReplicaData:
    """The samples of one replica.

    Args:
        config: The run.
        num_replicas: How many replicas the run is to have.
        device: Where the tensors go.
    """

    def __init__(self, config: RunConfig, num_replicas: int, device: torch.device) -> None:
        self._config = config
        self._num_replicas = num_replicas
        self._device = device
        self._loader: TorchLoader | None = None
        self._reads_for: tuple[int, int] | None = None
        with TorchLoader(config.loader()) as first:
            self._position = first.state_dict()

    def batch_size(self, live: int) -> int:
        """Returns the sequences of a step over all replicas that take part.

        Kept: always training.batch_size, which fewer replicas accumulate in more passes. Live: each
        replica computes its part of training.batch_size, and lost ones are missing.
        """
        batch_size = self._config.training.batch_size
        if self._config.parallel.elastic_batch == "kept":
            return batch_size
        return batch_size // self._num_replicas * live

    def next(self, members: Members) -> TorchBatch:
        """Returns this replica's part of the step after the last that was committed."""
        reads_for = (members.rank, members.live)
        if self._loader is None or self._reads_for != reads_for:
            self.discard()
            config = dataclasses.replace(
                self._config.loader(), batch_size=self.batch_size(members.live)
            )
            self._loader = TorchLoader(
                config, device=self._device, rank=members.rank, world_size=members.live
            )
            self._loader.load_state_dict(self._position)
            self._reads_for = reads_for
        return next(self._loader)

    def commit(self) -> None:
        """Takes note that the step of the last batch counts."""
        assert self._loader is not None
        self._position = self._loader.state_dict()

    def discard(self) -> None:
        """Goes back to the last committed step."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    @property
    def num_samples(self) -> int:
        """Samples of all committed steps."""
        consumed: int = self._position["consumed_samples"]
        return consumed

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last committed step."""
        return self._position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another replica, or a checkpoint, is."""
        self.discard()
        self._position = dict(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()
