"""Training loop of one elastic replica.

    for every step: agree on the members, heal > this replica's part of the batch > learning
    rate > forward, backward, sums over replicas > does the step commit? > update > row

It differs from `paceline.training.loop` in two ways. Replicas agree through their own group, which
outlives any of them. And a step may fail to commit, because a replica was lost while it ran: then
nothing has changed, and the remaining replicas repeat the step.
"""

import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, Literal

from paceline.core.units import MIB
from paceline.parallel import Session
from paceline.parallel.elastic import Members, ReplicaGradients
from paceline.parallel.replica_group import ReplicaGroup
from paceline.training.config import RunConfig
from paceline.training.elastic.data import ReplicaData
from paceline.training.elastic.launch import LIGHTHOUSE, NUM_REPLICAS, REPLICA, note_first_step
from paceline.training.elastic.reporter import Reporter
from paceline.training.elastic.step import ReplicaStep
from paceline.training.evaluation import HeldOut
from paceline.training.health.errors import DivergedError
from paceline.training.loop import RunOutcome
from paceline.training.metrics import REPLICAS, SAVED, EvaluationRow, EventRow, StepRow
from paceline.training.observers import Observer
from paceline.training.optimizers import learning_rate_factor, set_learning_rate
from paceline.training.parallelize import Trainee
from paceline.training.run_checkpointer import RunStates
from paceline.training.run_files import METRICS
from paceline.training.signals import StopRequest


def train_replica(
    config: RunConfig,
    session: Session,
    trainee: Trainee,
    states: RunStates,
    open_observer: Callable[[], Observer],
    stop: StopRequest,
) -> RunOutcome:
    """Trains one replica to the run's last step, or until the run is asked to stop.

    Args:
        config: The run.
        session: Distributed session of this process, its only rank.
        trainee: The model and its optimizers, as built.
        states: Saves to disk, and restores if there is no replica to heal from.
        open_observer: Creates the observer; called when this replica begins to report.
        stop: Whether the run was asked to stop.
    """
    num_steps = config.training.steps
    num_replicas = int(os.environ[NUM_REPLICAS])
    held_out = HeldOut.of(config, trainee, session.device)
    reporter = Reporter(pathlib.Path(config.out) / METRICS, open_observer)
    with ReplicaData(config, num_replicas, session.device) as data:
        group = ReplicaGroup(
            number=int(os.environ[REPLICA]),
            lighthouse=os.environ[LIGHTHOUSE],
            state=lambda: _state(trainee, data),
            load=lambda state: _load(state, trainee, data),
            timeout_s=config.parallel.replica_timeout_s,
            quorum_timeout_s=config.parallel.timeout_s,
        )
        gradients = ReplicaGradients(
            trainee.module.named_parameters(), group, config.parallel.bucket_size_mb * MIB
        )
        runner = ReplicaStep(config.training, trainee, group, gradients, session.device)
        members: Members | None = group.begin_step()
        if group.step == 0:
            # No replica is further: all start from the beginning, or resume from disk.
            group.resume(states.restore(trainee, data))
        result = None
        seen: Members | None = None
        ended = time.perf_counter()
        while group.step < num_steps:
            began = time.perf_counter()
            # The members of the first step are known: they are waiting in it for this replica.
            members = members or group.begin_step()
            step = group.step
            if step >= num_steps:
                break
            message = f"from step {step}, {members.live} of {num_replicas} replicas"
            reporter.lead(members.rank == 0, step, message)
            for event in _changes(seen, members, step, num_replicas):
                reporter.note(event)
            seen, members = members, None
            batch = data.next(seen)
            received = time.perf_counter()
            factor = learning_rate_factor(config.schedule, step, num_steps)
            set_learning_rate(trainee.optimizers.values(), factor)
            result = runner.run(
                batch, data.batch_size(seen.live), seen, stop=stop.received is not None
            )
            if result is None:
                data.discard()
                reporter.note(EventRow(step=step, name=REPLICAS, message=_again(step, group)))
                continue
            if not result.is_finite:
                raise DivergedError(
                    f"step {step + 1}: the loss is {result.loss}, the gradient norm "
                    f"{result.gradient_norm}; no replica has applied the update. Resume with a "
                    "lower optimizer.learning_rate or training.clip_norm"
                )
            data.commit()
            note_first_step()
            step = group.step
            before, ended = ended, time.perf_counter()
            reporter.note(
                StepRow(
                    step=step,
                    tokens=data.num_samples * config.data.context_length,
                    loss=result.loss,
                    gradient_norm=result.gradient_norm,
                    learning_rate=config.optimizer.learning_rate * factor,
                    step_time_s=ended - before,
                    data_wait_s=received - began,
                    first_sample=data.num_samples - data.batch_size(seen.live),
                    data_digest=f"{result.digest:016x}",
                )
            )
            is_last = step == num_steps or result.stop
            if held_out is not None and (
                step == num_steps or step % config.evaluation.every_steps == 0
            ):
                began = time.perf_counter()
                found = held_out.evaluate(trainee, runner.autocast)
                seconds = time.perf_counter() - began
                reporter.note(
                    EvaluationRow(
                        step=step,
                        loss=found.loss,
                        bits_per_byte=found.bits_per_byte,
                        time_s=seconds,
                    )
                )
            is_due = is_last or step % config.checkpoint.every_steps == 0
            # A lost replica may have saved the step before the others repeated it.
            if seen.rank == 0 and is_due and not states.is_saved(step):
                began = time.perf_counter()
                states.save(step, trainee, data)
                stall_s = time.perf_counter() - began
                reporter.note(
                    EventRow(step=step, name=SAVED, message=f"step {step}", time_s=stall_s)
                )
            if is_last:
                break
        step = group.step
        states.finish()
        group.close()
    reason: Literal["finished", "stopped"] = "finished" if step == num_steps else "stopped"
    reporter.note(EventRow(step=step, name=reason, message=f"after step {step}"))
    speaks = reporter.is_open
    reporter.close()
    return RunOutcome(
        reason=reason, step=step, loss=result.loss if result else float("nan"), is_spokesman=speaks
    )


def _state(trainee: Trainee, data: ReplicaData) -> dict[str, Any]:
    """Returns the state that another replica needs to heal; nothing is copied."""
    return {
        "model": trainee.module.state_dict(),
        "optimizers": {name: each.state_dict() for name, each in trainee.optimizers.items()},
        "data": json.dumps(data.state_dict()),
    }


def _load(state: dict[str, Any], trainee: Trainee, data: ReplicaData) -> None:
    trainee.module.load_state_dict(state["model"])
    for name, optimizer in trainee.optimizers.items():
        optimizer.load_state_dict(state["optimizers"][name])
    data.load_state_dict(json.loads(state["data"]))


def _changes(
    seen: Members | None, members: Members, step: int, num_replicas: int
) -> list[EventRow]:
    """Returns an event if the number of members has changed since the last step."""
    if seen is None or seen.live == members.live:
        return []
    message = f"{members.live} of {num_replicas} replicas from step {step + 1}, {seen.live} before"
    return [EventRow(step=step, name=REPLICAS, message=message)]


def _again(step: int, group: ReplicaGroup) -> str:
    problem = group.problem
    return f"step {step + 1} is repeated{f': {problem}' if problem else ''}"
