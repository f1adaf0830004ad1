"""Elastic replicas of a run: they may leave and rejoin while the others continue to train.

Replicas agree on the members of every step through a group of their own, which outlives any of
them. A replica that joins receives the state of one that is further. If a replica is lost while a
step runs, the step does not commit: nothing has changed, and the remaining replicas repeat it.

All replicas have the same results of a step. The first member reports them; a replica that becomes
the first opens the run's metrics, and adds the rows that a lost one did not write.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from paceline.core.units import MIB
from paceline.data.loader.torch_batches import TorchBatch, TorchLoader
from paceline.health.config import HealthConfig
from paceline.health.errors import DivergedError
from paceline.parallel.elastic import Members, ReplicaGradients
from paceline.training.config import RunConfig
from paceline.training.metrics import REPLICAS, STARTED, EventRow, MetricsFile, MetricsRow, StepRow
from paceline.training.observers import Observer
from paceline.training.parallelize import TrainState
from paceline.training.replica_launch import LIGHTHOUSE, NUM_REPLICAS, REPLICA, note_first_step


class Replicas:
    """This replica's membership in the steps of a run; the training loop and its steps call it."""

    def __init__(
        self, config: RunConfig, train_state: TrainState, device: torch.device, reporter: "Reporter"
    ) -> None:
        from paceline.parallel.replica_group import ReplicaGroup  # Needs torchft.

        self._context_length = config.data.context_length
        self._train_state = train_state
        self._reporter = reporter
        self._number = int(os.environ[NUM_REPLICAS])
        self.data = ReplicaData(config, self._number, device)
        self._group = ReplicaGroup(
            number=int(os.environ[REPLICA]),
            lighthouse=os.environ[LIGHTHOUSE],
            state=self._state,
            load=self._load,
            timeout_s=config.parallel.replica_timeout_s,
            quorum_timeout_s=config.parallel.timeout_s,
        )
        self._gradients = ReplicaGradients(
            train_state.module.named_parameters(),
            self._group.add_up,
            config.parallel.bucket_size_mb * MIB,
        )
        self.members = Members(rank=0, live=0, has_healed=False)
        """Members of the current step."""
        self._has_begun = False
        """Whether this replica has begun a step that it has not run yet."""

    @property
    def batch_size(self) -> int:
        """Sequences of the current step over all members."""
        return self.data.batch_size(self.members.live)

    def join(self, restore: Callable[[], int]) -> int:
        """Joins the others; returns the number of completed steps.

        If no replica is further, `restore` restores a state from disk and returns its step.
        """
        # The others wait in this step for this replica.
        self.members = self._group.begin_step()
        self._has_begun = True
        if self._group.step == 0:
            self._group.resume(restore())
        return self._group.step

    def begin_step(self) -> int:
        """Agrees on the members of a step, and heals if needed; returns the completed steps."""
        before = None if self._has_begun else self.members
        if not self._has_begun:
            self.members = self._group.begin_step()
        self._has_begun = False
        self.data.members = self.members
        step, live = self._group.step, self.members.live
        message = f"from step {step}, {live} of {self._number} replicas"
        self._reporter.lead(self.members.rank == 0, step, message)
        if before is not None and before.live != live:
            self._log(
                step,
                f"{live} of {self._number} replicas from step {step + 1}, {before.live} before",
            )
        return step

    @contextlib.contextmanager
    def summed(self, passes: int) -> Iterator[None]:
        """Sums the gradients of the passes in its body over the members."""
        self._gradients.begin(passes)
        yield
        self._gradients.finish()

    def add_up(self, sums: Tensor) -> None:
        """Sums a tensor over the members in place."""
        self._group.add_up(sums).wait()

    def commit(self) -> bool:
        """Returns whether every sum of the step includes all members; if not, it is repeated."""
        if self._group.commit():
            return True
        self.data.discard()
        step, problem = self._group.step, self._group.problem
        self._log(step, f"step {step + 1} is repeated{f': {problem}' if problem else ''}")
        return False

    def after_update(self) -> tuple[int, int]:
        """Counts the samples of a committed step; returns the first, and all tokens so far."""
        self.data.commit()
        note_first_step()
        num_samples = self.data.num_samples
        return num_samples - self.batch_size, num_samples * self._context_length

    def diverged(self, step: int, loss: float, gradient_norm: float) -> DivergedError:
        """Returns the error for a step that no replica has applied."""
        return DivergedError(
            f"step {step + 1}: the loss is {loss}, the gradient norm "
            f"{gradient_norm}; no replica has applied the update. Resume with a "
            "lower optimizer.learning_rate or training.clip_norm"
        )

    def close(self) -> bool:
        """Leaves the group; returns whether this replica reports the outcome of the run."""
        self._group.close()
        return self._reporter.is_open

    def _log(self, step: int, message: str) -> None:
        self._reporter.log(EventRow(step=step, name=REPLICAS, message=message))

    def _state(self) -> dict[str, Any]:
        """Returns the state that another replica needs to heal; nothing is copied."""
        optimizers = self._train_state.optimizers
        return {
            "model": self._train_state.module.state_dict(),
            "optimizers": {name: each.state_dict() for name, each in optimizers.items()},
            "data": json.dumps(self.data.state_dict()),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._train_state.module.load_state_dict(state["model"])
        for name, optimizer in self._train_state.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.data.load_state_dict(json.loads(state["data"]))


def replica_health(config: HealthConfig) -> HealthConfig:
    """Returns the checks of a replica: it is alone in its process group, and may be restarted."""
    return dataclasses.replace(
        config, hash_at_rest=False, spike_threshold=sys.float_info.max, step_timeout_s=None
    )


class ReplicaData:
    """Training samples of one replica; the position advances with committed steps only.

    The samples of a replica depend on the members of the step. If a step does not commit, or the
    next step has other members, prefetched samples are discarded, and the current members read them
    again. Each sample is therefore trained on exactly once.
    """

    def __init__(self, config: RunConfig, num_replicas: int, device: torch.device) -> None:
        self._config = config
        self._num_replicas = num_replicas
        self._device = device
        self.members = Members(rank=0, live=num_replicas, has_healed=False)
        """Members of the step whose samples are read next."""
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

    def __next__(self) -> TorchBatch:
        """Returns this replica's part of the step after the last committed one."""
        members = self.members
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


_KEPT_ROWS = 64
"""Number of step rows that a replica keeps in case it has to write them."""


class Reporter(Observer):
    """Writes rows while this replica is the first, and keeps the newest ones otherwise."""

    def __init__(self, metrics: pathlib.Path, open_observer: Callable[[], Observer]) -> None:
        self._metrics = metrics
        self._open_observer = open_observer
        self._observer: Observer | None = None
        self._kept: collections.deque[StepRow] = collections.deque(maxlen=_KEPT_ROWS)

    def lead(self, is_first: bool, step: int, message: str) -> None:
        """Starts or stops reporting, depending on the members of a step."""
        if is_first == (self._observer is not None):
            return
        if not is_first:
            self.close()
            return
        self._observer = self._open_observer()
        self._observer.log(EventRow(step=step, name=STARTED, message=message))
        written = _last_step(self._metrics)
        for row in self._kept:
            if written < row.step <= step:
                self._observer.log(row)

    @property
    def is_open(self) -> bool:
        """Whether this replica reports."""
        return self._observer is not None

    def log(self, row: MetricsRow) -> None:
        """Keeps a step row, and reports any row if this replica is the first."""
        if isinstance(row, StepRow):
            self._kept.append(row)
        if self._observer is not None:
            self._observer.log(row)

    def close(self) -> None:
        """Closes the observer, if it is open."""
        if self._observer is not None:
            self._observer.close()
            self._observer = None


def _last_step(metrics: pathlib.Path) -> int:
    rows = MetricsFile(metrics).read() if metrics.exists() else ()
    return max((row.step for row in rows if isinstance(row, StepRow)), default=0)
