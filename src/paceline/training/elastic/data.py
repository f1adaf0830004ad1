"""Batches for elastic replicas: the position advances with committed steps only.

The samples of a replica depend on the members of the step. If a step does not commit, or the next
step has other members, prefetched samples are discarded, and the current members read them again.
Each sample is therefore trained on exactly once.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import torch

from paceline.data.loader.torch_batches import TorchBatch, TorchLoader
from paceline.parallel.elastic import Members
from paceline.training.config import RunConfig


class ReplicaData:
    """Training samples of one replica.

    Args:
        config: The run.
        num_replicas: Intended number of replicas of the run.
        device: Device of the tensors.
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
        """Returns the sequences of a step over all live replicas.

        kept: always training.batch_size, which fewer replicas accumulate in more passes. live: each
        replica computes its part of training.batch_size, and the parts of lost ones are missing.
        """
        batch_size = self._config.training.batch_size
        if self._config.parallel.elastic_batch == "kept":
            return batch_size
        return batch_size // self._num_replicas * live

    def next(self, members: Members) -> TorchBatch:
        """Returns this replica's part of the step after the last committed one."""
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
        """Records that the step of the last batch is committed."""
        assert self._loader is not None
        self._position = self._loader.state_dict()

    def discard(self) -> None:
        """Discards everything that was read after the last committed step."""
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
        """Continues from the position of another replica or of a checkpoint."""
        self.discard()
        self._position = dict(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()
