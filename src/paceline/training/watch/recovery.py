"""What is done about a step that was not taken, or a state that is damaged.

Stop; leave the batch out; or go back to the newest checkpoint. After corruption the same samples
are trained on again, and nothing has happened. After a loss that is a spike or not finite, those
between the checkpoint and the failure are left out, because they may be its cause.
"""

from paceline.data.loader.torch_batches import TorchBatch, TorchLoader
from paceline.training.build import Trainee
from paceline.training.config import RunConfig
from paceline.training.metrics.observers import Observer
from paceline.training.metrics.rows import (
    CORRUPTED,
    FIRST_SAMPLE,
    NUM_SAMPLES,
    SKIPPED,
    STARTED,
    EventRow,
)
from paceline.training.run_state import RunStates
from paceline.training.steps.nonfinite import explain_nonfinite
from paceline.training.steps.step import StepResult, TrainingStep
from paceline.training.watch.errors import CorruptionError, DivergedError
from paceline.training.watch.watch import Watch

_CONSUMED = "consumed_samples"


class Recovery:
    """Takes a run back to where it can go on, or ends it; all ranks call it alike.

    Args:
        config: The run.
        states: Saves and restores all that it consists of.
        trainee: What is trained.
        loader: Its data.
        observer: Is told what happens.
        watch: What has found the failure.
    """

    def __init__(
        self,
        config: RunConfig,
        states: RunStates,
        trainee: Trainee,
        loader: TorchLoader,
        observer: Observer,
        watch: Watch,
    ) -> None:
        self._config = config.watch
        self._batch_size = config.training.batch_size
        self._states = states
        self._trainee = trainee
        self._loader = loader
        self._observer = observer
        self._watch = watch
        self._saves_every = config.checkpoint.every_steps
        self._in_a_row = 0
        self._num_taken = -1
        """Steps that were taken before the last batch that was skipped."""
        self._restored: int | None = None
        """The step to which the run has last gone back to leave samples out."""

    def after_refusal(
        self, step: int, result: StepResult, batch: TorchBatch, runner: TrainingStep
    ) -> int:
        """Returns the step to go on from after one that no rank has taken, or raises.

        Args:
            step: Steps that are done.
            result: Of the step after them.
            batch: What it was computed from.
            runner: Has computed it.
        """
        if self._watch.refusal == "corrupted":
            return self.after_damage(step, self._watch.explain_corruption())
        if (damage := self._watch.find_damage(step, at_once=True)) is not None:
            return self.after_damage(step, damage)
        is_spike = self._watch.refusal == "spike"
        answer = self._config.on_spike if is_spike else self._config.on_nonfinite
        what = f"step {step + 1}: the loss is {result.loss:g}"
        if is_spike:
            what += f", above the spike limit {self._watch.spike_limit:g}"
        else:
            what += f", the gradient norm {result.gradient_norm:g}"
        if answer == "skip" and self._may_skip():
            self._note_skipped(step, batch.first_sample, self._batch_size, what)
            return step
        if answer == "rollback" and self._may_go_back(step):
            restored = self._leave_out_window(what)
            if restored is not None:
                return restored
        kept = self._states.keep_diverged(step, self._trainee, self._loader)
        why = f"{self._in_a_row} in a row" if self._in_a_row else "no batch may be skipped"
        if not is_spike:
            why = _explain(runner, self._trainee, batch)
        raise DivergedError(
            f"{what}: {why}; no rank has applied the update, and {kept} has the state before the "
            "step. Resume from a checkpoint with a lower optimizer.learning_rate or "
            "training.clip_norm"
        )

    def after_damage(self, step: int, found: str) -> int:
        """Returns the step to go on from after something has changed by itself, or raises.

        Args:
            step: Steps that are done.
            found: Which rank is damaged, and where.
        """
        what = f"found at step {step}: {found}"
        if self._config.on_corruption == "rollback":
            restored = self._roll_back(f"after corruption at step {step}")
            if restored is not None:
                self._observer.note(EventRow(step=restored, name=CORRUPTED, message=what))
                return restored
        self._observer.note(EventRow(step=step, name=CORRUPTED, message=what))
        raise CorruptionError(
            f"corruption {what}; nothing was saved since. Run the same command again to resume "
            "from the newest checkpoint, without the host of a rank that is corrupted twice"
        )

    def _leave_out_window(self, what: str) -> int | None:
        """Goes back, and on after the batch that has failed; None without a checkpoint."""
        after = self._loader.state_dict()
        restored = self._roll_back(f"after {what}")
        if restored is None:
            return None
        first = self._loader.state_dict()[_CONSUMED]
        self._loader.load_state_dict(after)
        self._restored = restored
        self._note_skipped(restored, first, after[_CONSUMED] - first, what)
        return restored

    def _roll_back(self, reason: str) -> int | None:
        """Restores the newest checkpoint; returns its step, or None if there is none yet."""
        restored = self._states.roll_back(self._trainee, self._loader)
        if restored is not None:
            message = f"rolled back to step {restored}, {reason}"
            self._observer.note(EventRow(step=restored, name=STARTED, message=message))
            self._watch.hold()
        return restored

    def _may_skip(self) -> bool:
        """Counts batches that were skipped without a step that was taken between them."""
        is_next = self._num_taken == self._watch.num_taken
        self._num_taken = self._watch.num_taken
        return self._count(is_next=is_next)

    def _may_go_back(self, step: int) -> bool:
        """Counts returns to a checkpoint without a newer one between them."""
        is_next = self._restored is not None and step < self._restored + self._saves_every
        return self._count(is_next=is_next)

    def _count(self, *, is_next: bool) -> bool:
        self._in_a_row = self._in_a_row + 1 if is_next else 1
        return self._in_a_row <= self._config.most_in_a_row

    def _note_skipped(self, step: int, first: int, number: int, what: str) -> None:
        """Notes it with the step to come: a run that goes on from `step` reads them again."""
        last = first + number - 1
        self._observer.note(
            EventRow(
                step=step + 1,
                name=SKIPPED,
                message=f"samples {first:,} to {last:,}, {what}",
                details={FIRST_SAMPLE: first, NUM_SAMPLES: number},
            )
        )


def _explain(runner: TrainingStep, trainee: Trainee, batch: TorchBatch) -> str:
    last = batch.first_sample + len(batch.tokens) - 1
    return explain_nonfinite(
        trainee.module,
        lambda: runner.forward_and_backward(batch.tokens, batch.targets),
        f"samples {batch.first_sample:,} to {last:,}",
    )
