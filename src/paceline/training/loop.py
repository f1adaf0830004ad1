"""The training loop, top to bottom.

    resume > for every step: batch > learning rate > forward, backward, average, update >
    row of metrics > evaluation and checkpoint where they are due > agree on whether to go on

Everything that ranks must agree on (loss, finite or not, stop or not) comes out of the step itself,
so that no rank ever leaves the loop alone.
"""

import dataclasses
import time
from typing import Literal

from paceline.core.errors import PacelineError
from paceline.data.loader.torch_batches import TorchBatch, TorchLoader
from paceline.parallel import Session
from paceline.parallel.ranks.supervision.heartbeats import Phase, beat, beat_step
from paceline.training.build import Trainee
from paceline.training.config import RunConfig
from paceline.training.evaluation import HeldOut, Sampler
from paceline.training.metrics.observers import Observer
from paceline.training.metrics.probe import StepProbe
from paceline.training.metrics.rows import (
    CHECKPOINT,
    SAVED,
    STARTED,
    EvaluationRow,
    EventRow,
    StepRow,
)
from paceline.training.run_state import RunStates
from paceline.training.signals import StopRequest
from paceline.training.steps.nonfinite import explain_nonfinite
from paceline.training.steps.optimizers import set_learning_rate
from paceline.training.steps.schedule import learning_rate_factor
from paceline.training.steps.step import StepResult, TrainingStep


class DivergedError(PacelineError):
    """Loss or gradients that are not finite; no rank has updated its parameters with them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    reason: Literal["finished", "stopped"]
    step: int
    """Steps that are done."""
    loss: float
    """Of the last step."""
    is_spokesman: bool = True
    """Whether this rank speaks for the run, if it is the first; of replicas, one does."""


def train(
    config: RunConfig,
    session: Session,
    trainee: Trainee,
    states: RunStates,
    observer: Observer,
    stop: StopRequest,
) -> RunOutcome:
    """Trains from where the run was left to its last step, or until it is asked to stop.

    Args:
        config: The run.
        session: This rank among the others.
        trainee: The model and its optimizers, as built.
        states: Saves and restores all that a run consists of.
        observer: Is told what happens.
        stop: Whether the run was asked to stop.
    """
    num_steps = config.training.steps
    runner = TrainingStep(
        config.training, trainee.model, list(trainee.optimizers.values()), session.device
    )
    held_out = HeldOut.of(config, session.device)
    sampler = Sampler.of(config, trainee, session.device)
    probe = StepProbe(
        trainee.model, session.device, config.logging.every_steps, enabled=session.rank == 0
    )
    with TorchLoader(
        config.loader(), device=session.device, rank=session.rank, world_size=session.world_size
    ) as loader:
        step = states.restore(trainee, loader)
        observer.note(EventRow(step=step, name=STARTED, message=_start(step, session)))
        _tell(observer, step, states)
        result = None
        first_step = step
        ended = time.perf_counter()
        while step < num_steps:
            began = time.perf_counter()
            beat(Phase.DATA)
            batch = next(loader)
            received = time.perf_counter()
            factor = learning_rate_factor(config.schedule, step, num_steps)
            set_learning_rate(trainee.optimizers.values(), factor)
            probe.prepare(step + 1)
            result = runner.run(
                batch.tokens,
                batch.targets,
                stop=stop.received is not None,
                digest=batch.digest or 0,
            )
            if not result.is_finite:
                kept = states.keep_diverged(step, trainee, loader)
                raise _diverged(step + 1, result, kept, _explain(runner, trainee, batch))
            step += 1
            before, ended = ended, time.perf_counter()
            seen = probe.look(step)
            observer.note(
                StepRow(
                    step=step,
                    tokens=step * config.tokens_per_step,
                    loss=result.loss,
                    gradient_norm=result.gradient_norm,
                    learning_rate=config.optimizer.learning_rate * factor,
                    step_time_s=ended - before,
                    data_wait_s=received - began,
                    first_sample=batch.first_sample,
                    data_digest=f"{result.digest:016x}",
                    exposed_communication_s=seen.exposed_communication_s,
                    memory_bytes=seen.memory_bytes,
                )
            )
            beat_step(step, step - first_step)
            is_last = step == num_steps or result.stop
            if held_out is not None and (
                step == num_steps or step % config.evaluation.every_steps == 0
            ):
                began = time.perf_counter()
                beat(Phase.EVALUATION)
                found = held_out.evaluate(trainee.model, runner.autocast)
                sample = None if sampler is None else sampler.sample(trainee, runner.autocast)
                observer.note(
                    EvaluationRow(
                        step=step,
                        loss=found.loss,
                        bits_per_byte=found.bits_per_byte,
                        sample=sample,
                        time_s=time.perf_counter() - began,
                    )
                )
            if is_last or step % config.checkpoint.every_steps == 0:
                began = time.perf_counter()
                beat(Phase.SAVE)
                states.save(step, trainee, loader)
                stall_s = time.perf_counter() - began
                observer.note(
                    EventRow(step=step, name=SAVED, message=f"step {step}", time_s=stall_s)
                )
            elif config.checkpoint.is_due_in_memory(step):
                states.keep_in_memory(step, trainee, loader)
                _tell(observer, step, states)
            if is_last:
                break
        beat(Phase.END)
        states.finish()
    reason: Literal["finished", "stopped"] = "finished" if step == num_steps else "stopped"
    observer.note(EventRow(step=step, name=reason, message=f"after step {step}"))
    return RunOutcome(reason=reason, step=step, loss=result.loss if result else float("nan"))


def _tell(observer: Observer, step: int, states: RunStates) -> None:
    for notice in states.take_notices():
        observer.note(EventRow(step=step, name=CHECKPOINT, message=notice))


def _explain(runner: TrainingStep, trainee: Trainee, batch: TorchBatch) -> str:
    last = batch.first_sample + len(batch.tokens) - 1
    return explain_nonfinite(
        trainee.module,
        lambda: runner.forward_and_backward(batch.tokens, batch.targets),
        f"samples {batch.first_sample:,} to {last:,}",
    )


def _diverged(step: int, result: StepResult, kept: str, explanation: str) -> DivergedError:
    return DivergedError(
        f"step {step}: the loss is {result.loss}, the norm of the gradients "
        f"{result.gradient_norm}: {explanation}; no rank has stepped, and {kept} has the state "
        "before the step. Go on from a checkpoint with a lower optimizer.learning_rate or "
        "training.clip_norm"
    )


def _start(step: int, session: Session) -> str:
    where = f"{session.world_size} ranks on {session.device.type}"
    return f"from step {step}, {where}" if step else f"from the beginning, {where}"
