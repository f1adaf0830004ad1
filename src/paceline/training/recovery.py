"""Response to a rejected step or a corrupted state.

The run stops, skips the batch, or rolls back to the newest checkpoint. After corruption it trains
on the same samples again, as if nothing had happened. After a spike or a non-finite loss it skips
the samples between the checkpoint and the failure, because they may be the cause.

To find where values stopped being finite, a step that no rank has applied is recomputed with its
unchanged parameters, while hooks check the output of every module and its gradient. All ranks take
part, because strategies that shard parameters communicate in every pass.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.loader.torch_batches import TorchBatch
from paceline.health.errors import CorruptionError, DivergedError
from paceline.health.monitor import HealthMonitor
from paceline.parallel.dtensor import local_tensor
from paceline.training.config import RunConfig
from paceline.training.metrics import (
    CORRUPTED,
    FIRST_SAMPLE,
    NUM_SAMPLES,
    SKIPPED,
    STARTED,
    EventRow,
)
from paceline.training.observers import Observer
from paceline.training.parallelize import TrainState
from paceline.training.run_checkpointer import Position, RunCheckpointer
from paceline.training.step import StepResult, TrainingStep

_MOST_RANKS = 4
"""Maximum number of ranks that a message names."""


def explain_nonfinite(module: nn.Module, compute: Callable[[], object], what: str) -> str:
    """Recomputes a step; returns the ranks and modules where it first became non-finite."""
    with _watched(module) as found:
        compute()
    own = f"rank {dist.get_rank()} ({what}): {found[0]}" if found else None
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, own)
    wrong = [report for report in reports if report is not None]
    if not wrong:
        return "everything was finite when computed again: suspect faulty hardware of a rank"
    more = f"; and {len(wrong) - _MOST_RANKS} more ranks" if len(wrong) > _MOST_RANKS else ""
    return "; ".join(wrong[:_MOST_RANKS]) + more


@contextlib.contextmanager
def _watched(module: nn.Module) -> Iterator[list[str]]:
    """Yields a list that collects non-finite outputs and gradients, in order of occurrence."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def look(_module: nn.Module, _inputs: object, output: object) -> None:
            if not isinstance(output, Tensor):
                return
            if not _is_finite(output):
                found.append(f"the output of {name} is the first that is not finite")
            if output.requires_grad:
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: look_back(name, gradient)
                )

        return look

    def look_back(name: str, gradient: Tensor) -> None:
        if not _is_finite(gradient):
            found.append(f"the gradient of {name}'s output is the first that is not finite")

    hooks = [
        each.register_forward_hook(watch(name or "the model"))
        for name, each in module.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(local_tensor(values)).all())


_CONSUMED = "consumed_samples"


class Recovery:
    """Rolls a run back to a usable state, or ends it; all ranks make the same calls."""

    def __init__(
        self,
        config: RunConfig,
        checkpointer: RunCheckpointer,
        train_state: TrainState,
        loader: Position,
        observer: Observer,
        monitor: HealthMonitor,
    ) -> None:
        self._config = config.watch
        self._batch_size = config.training.batch_size
        self._checkpointer = checkpointer
        self._trainee = train_state
        self._loader = loader
        self._observer = observer
        self._monitor = monitor
        self._saves_every = config.checkpoint.every_steps
        self._in_a_row = 0
        self._num_applied = -1
        """Number of applied steps before the last skipped batch."""
        self._restored: int | None = None
        """Step of the last rollback that skipped samples."""

    def after_skip(
        self, step: int, result: StepResult, batch: TorchBatch, runner: TrainingStep
    ) -> int:
        """Returns the step to continue from after a rejected step, or raises."""
        if self._monitor.skip_reason == "corrupted":
            return self.after_damage(step, self._monitor.explain_corruption())
        if (damage := self._monitor.find_damage(step, at_once=True)) is not None:
            return self.after_damage(step, damage)
        is_spike = self._monitor.skip_reason == "spike"
        answer = self._config.on_spike if is_spike else self._config.on_nonfinite
        what = f"step {step + 1}: the loss is {result.loss:g}"
        if is_spike:
            what += f", above the spike limit {self._monitor.spike_limit:g}"
        else:
            what += f", the gradient norm {result.gradient_norm:g}"
        why = "no batch may be skipped"
        if answer == "skip" and self._may_skip():
            self._log_skipped(step, batch.first_sample, self._batch_size, what)
            return step
        if answer == "rollback" and self._may_go_back(step):
            restored = self._leave_out_window(what)
            if restored is not None:
                return restored
            why = "there is no checkpoint to roll back to"
        elif self._in_a_row:
            why = f"{self._in_a_row} in a row"
        kept = self._checkpointer.save_diverged(step, self._trainee, self._loader)
        if not is_spike:
            why = _explain(runner, self._trainee, batch)
        raise DivergedError(
            f"{what}: {why}; no rank has applied the update, and {kept} has the state before the "
            "step. Resume from a checkpoint with a lower optimizer.learning_rate or "
            "training.clip_norm"
        )

    def after_damage(self, step: int, found: str) -> int:
        """Returns the step to continue from after corruption, or raises."""
        what = f"found at step {step}: {found}"
        if self._config.on_corruption == "rollback":
            restored = self._roll_back(f"after corruption at step {step}")
            if restored is not None:
                self._observer.log(EventRow(step=restored, name=CORRUPTED, message=what))
                return restored
        self._observer.log(EventRow(step=step, name=CORRUPTED, message=what))
        raise CorruptionError(
            f"corruption {what}; nothing was saved since. Run the same command again to resume "
            "from the newest checkpoint, without the host of a rank that is corrupted twice"
        )

    def _leave_out_window(self, what: str) -> int | None:
        """Rolls back and skips past the failed batch; returns None if there is no checkpoint."""
        after = self._loader.state_dict()
        restored = self._roll_back(f"after {what}")
        if restored is None:
            return None
        first = self._loader.state_dict()[_CONSUMED]
        self._loader.load_state_dict(after)
        self._restored = restored
        self._log_skipped(restored, first, after[_CONSUMED] - first, what)
        return restored

    def _roll_back(self, reason: str) -> int | None:
        """Restores the newest checkpoint; returns its step, or None if there is none yet."""
        restored = self._checkpointer.roll_back(self._trainee, self._loader)
        if restored is not None:
            message = f"rolled back to step {restored}, {reason}"
            self._observer.log(EventRow(step=restored, name=STARTED, message=message))
            self._monitor.update_checksum()
        return restored

    def _may_skip(self) -> bool:
        """Counts skips without an applied step in between; returns whether one more is allowed."""
        is_next = self._num_applied == self._monitor.num_applied
        self._num_applied = self._monitor.num_applied
        return self._count(is_next=is_next)

    def _may_go_back(self, step: int) -> bool:
        """Counts rollbacks to the same checkpoint; returns whether another one is allowed."""
        is_next = self._restored is not None and step < self._restored + self._saves_every
        return self._count(is_next=is_next)

    def _count(self, *, is_next: bool) -> bool:
        self._in_a_row = self._in_a_row + 1 if is_next else 1
        return self._in_a_row <= self._config.most_in_a_row

    def _log_skipped(self, step: int, first: int, number: int, what: str) -> None:
        """Records skipped samples under the next step.

        A run that resumes from `step` drops this event, because it reads the samples again.
        """
        last = first + number - 1
        self._observer.log(
            EventRow(
                step=step + 1,
                name=SKIPPED,
                message=f"samples {first:,} to {last:,}, {what}",
                details={FIRST_SAMPLE: first, NUM_SAMPLES: number},
            )
        )


def _explain(runner: TrainingStep, train_state: TrainState, batch: TorchBatch) -> str:
    last = batch.first_sample + len(batch.tokens) - 1
    return explain_nonfinite(
        train_state.module,
        lambda: runner.forward_and_backward(batch.tokens, batch.targets),
        f"samples {batch.first_sample:,} to {last:,}",
    )
