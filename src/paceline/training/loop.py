"""The training loop, top to bottom.

    resume > for every step: batch > learning rate > forward, backward, average, update >
    metrics row > compare ranks > evaluation and checkpoint if due > agree on whether to continue

Several sites average their parameters while the optimizer steps, and once more after the last step,
so that the run ends with one model.

Everything that ranks must agree on (loss, whether to update, whether to stop) is a result of the
step itself, so that no rank ever leaves the loop alone. The checks made meanwhile are those of
`paceline.health`. Elastic replicas join the loop through `paceline.training.replicas`, which agrees
on the members of each step and on whether it commits.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from paceline.core.host import resident_bytes
from paceline.core.units import format_decimal
from paceline.data.loader.torch_batches import TorchLoader
from paceline.devices import accelerator
from paceline.health.config import HealthConfig
from paceline.health.hang import Watchdog
from paceline.health.monitor import HealthMonitor
from paceline.parallel import Session
from paceline.parallel.outer.exchange import ExchangeReport
from paceline.parallel.ranks.heartbeats import Phase, beat, beat_step
from paceline.parallel.strategies import record_statistics, synchronization_stats
from paceline.training.config import RunConfig
from paceline.training.evaluation import HeldOut, Sampler
from paceline.training.metrics import (
    CHECKPOINT,
    EXCHANGED,
    LOST,
    SAVED,
    STARTED,
    EvaluationRow,
    EventRow,
    MetricsFile,
    StepRow,
)
from paceline.training.observers import Observer
from paceline.training.optimizers import learning_rate_factor, set_learning_rate
from paceline.training.parallelize import TrainState
from paceline.training.recovery import Recovery
from paceline.training.replicas import ReplicaData, Replicas, replica_health
from paceline.training.run_checkpointer import RunCheckpointer
from paceline.training.run_directory import METRICS, STACKS
from paceline.training.step import TrainingStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """Sampled metrics of a step; None if not sampled or not available."""

    exposed_communication_s: float | None = None
    memory_bytes: int | None = None


class StepProbe:
    """Samples every n-th step."""

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
    """Returns an accelerator's peak since the start, or this process's resident memory."""
    if device.type == "cpu":
        return resident_bytes()
    return accelerator.peak_allocated_bytes(device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    reason: Literal["finished", "stopped"]
    step: int
    """Number of completed steps."""
    loss: float
    """Loss of the last step."""
    reports: bool = True
    """Whether this rank reports the outcome if it is rank 0. Every replica has a rank 0, and one of
    them reports."""


def train(
    config: RunConfig,
    session: Session,
    train_state: TrainState,
    checkpointer: RunCheckpointer,
    observer: Observer,
    should_stop: Callable[[], bool],
    replicas: Replicas | None = None,
) -> RunOutcome:
    """Trains from the newest saved state to the last step, or until any rank should stop.

    An elastic run has replicas, which share each step.
    """
    num_steps = config.training.steps
    shard = train_state.data_shard
    health = config.watch if replicas is None else replica_health(config.watch)
    monitor = make_monitor(config, health, session, train_state)
    runner = TrainingStep(config.training, train_state, session.device, monitor, replicas)
    held_out = sampler = None
    if config.evaluation.sequences:
        held_out = HeldOut(config, train_state, session.device)
    if (prompt := config.evaluation.sample_prompt) is not None:
        sampler = Sampler(prompt, config, train_state, session.device)
    probe = StepProbe(
        train_state.model,
        session.device,
        config.logging.every_steps,
        enabled=session.rank == 0 and replicas is None,
    )
    data: TorchLoader | ReplicaData
    if replicas is None:
        data = TorchLoader(
            config.loader(),
            device=session.device,
            rank=shard.data_rank,
            world_size=shard.data_ranks,
        )
    else:
        data = replicas.data
    with data, monitor.watchdog:
        recovery = Recovery(config, checkpointer, train_state, data, observer, monitor)
        if replicas is None:
            step = checkpointer.restore(train_state, data)
            observer.log(EventRow(step=step, name=STARTED, message=_start(step, session)))
            _log_notices(observer, step, checkpointer)
        else:
            step = replicas.join(lambda: checkpointer.restore(train_state, data))
        monitor.update_checksum()
        loss = float("nan")
        first_step = step
        ended = time.perf_counter()
        while step < num_steps:
            began = time.perf_counter()
            if replicas is not None and (step := replicas.begin_step()) >= num_steps:
                break
            monitor.begin_step()
            beat(Phase.DATA)
            batch = next(data)
            received = time.perf_counter()
            factor = learning_rate_factor(config.schedule, step, num_steps)
            set_learning_rate(train_state.optimizers.values(), factor)
            probe.prepare(step + 1)
            result = runner.run(
                batch.tokens, batch.targets, stop=should_stop(), digest=batch.digest or 0
            )
            if not result.is_committed:
                continue  # A replica was lost: the others repeat the step.
            if monitor.skip_reason is not None:
                if replicas is not None:
                    raise replicas.diverged(step, result.loss, result.gradient_norm)
                step = recovery.after_skip(step, result, batch, runner)
                continue
            step += 1
            loss = result.loss
            outer = train_state.outer
            if outer is not None and step == num_steps:
                outer.finish()
            first_sample, num_tokens = batch.first_sample, step * config.tokens_per_step
            if replicas is not None:
                first_sample, num_tokens = replicas.after_update()
            monitor.update_checksum()
            before, ended = ended, time.perf_counter()
            seen = probe.look(step)
            observer.log(
                StepRow(
                    step=step,
                    tokens=num_tokens,
                    loss=result.loss,
                    gradient_norm=result.gradient_norm,
                    learning_rate=config.optimizer.learning_rate * factor,
                    step_time_s=ended - before,
                    data_wait_s=received - began,
                    first_sample=first_sample,
                    data_digest=f"{result.digest:016x}",
                    exposed_communication_s=seen.exposed_communication_s,
                    memory_bytes=seen.memory_bytes,
                )
            )
            if outer is not None and (exchange := outer.take_last_exchange()) is not None:
                observer.log(exchange_event(step, exchange))
            beat_step(step, step - first_step)
            for name, message in monitor.findings(step, result.loss):
                observer.log(EventRow(step=step, name=name, message=message))
            is_last = step == num_steps or result.stop
            saves = is_last or step % config.checkpoint.every_steps == 0
            keeps = saves or config.checkpoint.is_due_in_memory(step)
            if (damage := monitor.find_damage(step, at_once=keeps)) is not None:
                step = recovery.after_damage(step, damage)
                continue
            if held_out is not None and (
                step == num_steps or step % config.evaluation.every_steps == 0
            ):
                began = time.perf_counter()
                beat(Phase.EVALUATION)
                found = held_out.evaluate(train_state, runner.autocast)
                sample = None if sampler is None else sampler.sample(train_state, runner.autocast)
                observer.log(
                    EvaluationRow(
                        step=step,
                        loss=found.loss,
                        bits_per_byte=found.bits_per_byte,
                        sample=sample,
                        time_s=time.perf_counter() - began,
                    )
                )
            # One replica saves. A lost one may have saved the step before the others repeated it.
            if replicas is not None and saves:
                saves = replicas.members.rank == 0 and not checkpointer.is_saved(step)
            if saves:
                began = time.perf_counter()
                beat(Phase.SAVE)
                checkpointer.save(step, train_state, data)
                stall_s = time.perf_counter() - began
                observer.log(
                    EventRow(step=step, name=SAVED, message=f"step {step}", time_s=stall_s)
                )
            elif config.checkpoint.is_due_in_memory(step):
                checkpointer.save_in_memory(step, train_state, data)
                _log_notices(observer, step, checkpointer)
            if is_last:
                break
        beat(Phase.END)
        checkpointer.finish()
    reports = replicas is None or replicas.close()
    reason: Literal["finished", "stopped"] = "finished" if step == num_steps else "stopped"
    observer.log(EventRow(step=step, name=reason, message=f"after step {step}"))
    return RunOutcome(reason=reason, step=step, loss=loss, reports=reports)


def make_monitor(
    config: RunConfig, health: HealthConfig, session: Session, train_state: TrainState
) -> HealthMonitor:
    """Returns the monitor of a rank, which logs a lost rank among the run's metrics."""
    out = pathlib.Path(config.out)

    def report_lost(step: int, message: str) -> None:
        MetricsFile(out / METRICS).append(EventRow(step=step, name=LOST, message=message))

    timeout_s = health.step_timeout_s
    if timeout_s is None and session.world_size > 1 and session.device.type != "cpu":
        # There no wait for a message raises an error, and the host waits for the device for ever.
        timeout_s = config.parallel.timeout_s
    watchdog = Watchdog(
        rank=session.rank,
        world_size=session.world_size,
        stacks=out / STACKS,
        report=report_lost,
        timeout_s=timeout_s,
    )
    return HealthMonitor(
        health, train_state.tensors, session.device, session.world_size, watchdog, train_state.site
    )


def exchange_event(step: int, report: ExchangeReport) -> EventRow:
    """Returns the event of a fragment's exchange that ended with a step."""
    return EventRow(
        step=step,
        name=EXCHANGED,
        message=(
            f"fragment {report.fragment} of step {report.step}, "
            f"{format_decimal(report.sent_bytes, 'B')} in {report.in_flight_s:.3g} s"
        ),
        time_s=report.exposed_s,
        details={
            "fragment": report.fragment,
            "sent_bytes": report.sent_bytes,
            "in_flight_s": report.in_flight_s,
            "own_drift": report.own_drift,
            "mean_drift": report.mean_drift,
        },
    )


def _log_notices(observer: Observer, step: int, checkpointer: RunCheckpointer) -> None:
    for notice in checkpointer.take_notices():
        observer.log(EventRow(step=step, name=CHECKPOINT, message=notice))


def _start(step: int, session: Session) -> str:
    where = f"{session.world_size} ranks on {session.device.type}"
    return f"from step {step}, {where}" if step else f"from the beginning, {where}"
