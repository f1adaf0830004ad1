"""The training loop, top to bottom.

    resume > for every step: batch > learning rate > forward, backward, average, update >
    metrics row > compare ranks > evaluation and checkpoint if due > agree on whether to continue

Everything that ranks must agree on (loss, whether to update, whether to stop) is a result of the
step itself, so that no rank ever leaves the loop alone. The checks made meanwhile are in `watch/`.

Samples step metrics that are expensive to measure, every few steps.
"""

import dataclasses
import time
from typing import Literal

import torch
from torch import nn

from paceline.core.host_memory import resident_bytes
from paceline.data.loader.torch_batches import TorchLoader
from paceline.parallel import Session
from paceline.parallel.ranks.heartbeats import Phase, beat, beat_step
from paceline.parallel.strategies import record_statistics, synchronization_stats
from paceline.training.config import RunConfig
from paceline.training.evaluation import HeldOut, Sampler
from paceline.training.health.monitor import Watch
from paceline.training.metrics import CHECKPOINT, SAVED, STARTED, EvaluationRow, EventRow, StepRow
from paceline.training.observers import Observer
from paceline.training.optimizers import learning_rate_factor, set_learning_rate
from paceline.training.parallelize import Trainee
from paceline.training.recovery import Recovery
from paceline.training.run_checkpointer import RunStates
from paceline.training.signals import StopRequest
from paceline.training.step import TrainingStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """Sampled metrics of a step; None if not sampled or not available."""

    exposed_communication_s: float | None = None
    memory_bytes: int | None = None


class StepProbe:
    """Samples every n-th step.

    Args:
        model: The model, wrapped by its strategy.
        device: Device to compute on.
        every_steps: Steps between samples.
        enabled: Whether this rank samples at all.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, every_steps: int, *, enabled: bool = True
    ) -> None:
        self._model = model
        self._device = device
        self._every_steps = every_steps
        self._is_enabled = enabled

    def prepare(self, step: int) -> None:
        """Enables communication statistics for the steps to be sampled, and only for these."""
        if self._is_enabled:
            record_statistics(self._model, self._is_due(step))

    def look(self, step: int) -> Look:
        """Returns the metrics of the step that just ended, if it is to be sampled."""
        if not self._is_enabled or not self._is_due(step):
            return Look()
        stats = synchronization_stats(self._model)
        return Look(
            exposed_communication_s=None if stats is None else stats.exposed_wait_s,
            memory_bytes=memory_in_use_bytes(self._device),
        )

    def _is_due(self, step: int) -> bool:
        return step % self._every_steps == 0


def memory_in_use_bytes(device: torch.device) -> int:
    """Returns the peak of a GPU's tensors since the start, or this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_bytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    reason: Literal["finished", "stopped"]
    step: int
    """Number of completed steps."""
    loss: float
    """Loss of the last step."""
    is_spokesman: bool = True
    """Whether this rank reports the outcome if it is rank 0. Every replica has a rank 0, and one of
    them reports."""


def train(
    config: RunConfig,
    session: Session,
    trainee: Trainee,
    states: RunStates,
    observer: Observer,
    stop: StopRequest,
) -> RunOutcome:
    """Trains from the newest saved state to the last step, or until the run is asked to stop.

    Args:
        config: The run.
        session: Distributed session of this rank.
        trainee: The model and its optimizers, as built.
        states: Saves and restores the state of the run.
        observer: Receives the metrics rows.
        stop: Whether the run was asked to stop.
    """
    num_steps = config.training.steps
    watch = Watch(config, session, trainee)
    runner = TrainingStep(
        config.training,
        trainee.model,
        list(trainee.optimizers.values()),
        session.device,
        watch,
        share=trainee.share,
        laid_out=trainee.laid_out,
    )
    held_out = HeldOut.of(config, trainee, session.device)
    sampler = Sampler.of(config, trainee, session.device)
    probe = StepProbe(
        trainee.model, session.device, config.logging.every_steps, enabled=session.rank == 0
    )
    with (
        TorchLoader(
            config.loader(),
            device=session.device,
            rank=trainee.share.data_rank,
            world_size=trainee.share.data_ranks,
        ) as loader,
        watch.dog,
    ):
        recovery = Recovery(config, states, trainee, loader, observer, watch)
        step = states.restore(trainee, loader)
        observer.note(EventRow(step=step, name=STARTED, message=_start(step, session)))
        _tell(observer, step, states)
        watch.hold()
        result = None
        first_step = step
        ended = time.perf_counter()
        while step < num_steps:
            began = time.perf_counter()
            watch.begin_step()
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
            if watch.refusal is not None:
                step = recovery.after_refusal(step, result, batch, runner)
                continue
            step += 1
            watch.hold()
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
            for name, message in watch.findings(step, result):
                observer.note(EventRow(step=step, name=name, message=message))
            is_last = step == num_steps or result.stop
            saves = is_last or step % config.checkpoint.every_steps == 0
            keeps = saves or config.checkpoint.is_due_in_memory(step)
            if (damage := watch.find_damage(step, at_once=keeps)) is not None:
                step = recovery.after_damage(step, damage)
                continue
            if held_out is not None and (
                step == num_steps or step % config.evaluation.every_steps == 0
            ):
                began = time.perf_counter()
                beat(Phase.EVALUATION)
                found = held_out.evaluate(trainee, runner.autocast)
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
            if saves:
                began = time.perf_counter()
                beat(Phase.SAVE)
                states.save(step, trainee, loader)
                stall_s = time.perf_counter() - began
                observer.note(
                    EventRow(step=step, name=SAVED, message=f"step {step}", time_s=stall_s)
                )
            elif keeps:
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


def _start(step: int, session: Session) -> str:
    where = f"{session.world_size} ranks on {session.device.type}"
    return f"from step {step}, {where}" if step else f"from the beginning, {where}"
