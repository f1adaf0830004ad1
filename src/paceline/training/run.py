"""Runs training on one rank: creates the run directory and the model, then enters the loop.

Creates the observers of a run on its first rank, and the expectation that they receive.
"""

import os
import pathlib
import time
from collections.abc import Sequence

import msgspec
import torch
from rich.console import Console

from paceline.core.errors import PacelineError, UsageError, is_out_of_memory
from paceline.core.plan import Estimate
from paceline.core.specs import precision_preset
from paceline.data.manifest import TOKENIZER, read_manifest
from paceline.data.storage import open_storage
from paceline.models.hugging_face.files import read_config
from paceline.parallel import Session
from paceline.parallel.ranks.hardware import (
    describe_hardware,
    memory_limit_bytes,
    peak_flops,
    usable_memory_bytes,
)
from paceline.parallel.ranks.heartbeats import Phase, beat
from paceline.parallel.ranks.supervisor import Restart
from paceline.records.environment import capture_environment
from paceline.training.config import RunConfig
from paceline.training.forecast import (
    MEMORY_REMEDY,
    Forecast,
    earlier_runs,
    forecast,
    memory_need,
    require_fit,
)
from paceline.training.layout import layout_of
from paceline.training.loop import RunOutcome, train
from paceline.training.metrics import Expectation, MetricsFile
from paceline.training.observers import (
    FileObserver,
    LogObserver,
    Observer,
    Observers,
    RestartLogger,
)
from paceline.training.panel import PanelObserver
from paceline.training.parallelize import build
from paceline.training.record import RecordObserver
from paceline.training.replica_launch import NUM_REPLICAS
from paceline.training.replicas import Replicas, Reporter
from paceline.training.run_checkpointer import RunCheckpointer
from paceline.training.run_files import (
    CHECKPOINTS,
    CONFIG,
    DIVERGED,
    ENVIRONMENT,
    EXPECTATION,
    METRICS,
)
from paceline.training.signals import StopRequest
from paceline.training.sinks import make_sinks, require_sinks
from paceline.training.toml_config import encode_config


def make_observers(config: RunConfig, session: Session, expected: Expectation) -> list[Observer]:
    """Creates the observers: metrics file, record, panel or log, and trackers."""
    directory = pathlib.Path(config.out)
    return [
        FileObserver(MetricsFile(directory / METRICS)),
        RecordObserver(config, session, expected),
        _panel_or_log(config, expected),
        *make_sinks(config, directory, expected),
    ]


def expect(
    config: RunConfig,
    session: Session,
    num_ranks: int,
    predicted: Forecast | None,
    final_loss: Estimate | None = None,
) -> Expectation:
    """Returns the predictions and limits of a run on these ranks before its first step.

    Args:
        config: The run.
        session: Distributed session of rank 0.
        num_ranks: Ranks of the run; of a run with replicas, the number of replicas.
        predicted: Forecast of the run; None for models without one.
        final_loss: Predicted final loss, if any.
    """
    precision = precision_preset(config.training.precision)
    peak = peak_flops(describe_hardware(session.device), precision)
    limit = memory_limit_bytes(session.device)
    if limit is not None and session.device.type == "cpu":
        limit //= session.placement.local_world_size  # Local ranks share one memory.
    known = Expectation(
        num_steps=config.training.steps,
        tokens_per_step=config.tokens_per_step,
        peak_flops_per_s=None if peak is None else peak * num_ranks,
        memory_limit_bytes=limit,
        final_loss=final_loss,
    )
    if predicted is None:
        return known
    return msgspec.structs.replace(
        known,
        flops_per_step=predicted.flops / predicted.num_steps,
        memory_bytes=predicted.memory.total,
        step_time_s=predicted.step_time_s,
        corrected=dict(predicted.corrected),
    )


def _panel_or_log(config: RunConfig, expected: Expectation) -> Observer:
    """Returns a panel if stderr is a terminal, otherwise a log."""
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return PanelObserver(pathlib.Path(config.out).name, expected, console)
    return LogObserver(config.logging.every_steps, expected)


class OutOfMemoryError(PacelineError):
    """Raised when a step does not fit into a rank's memory."""


def run(
    config: RunConfig,
    session: Session,
    calibration: pathlib.Path | None = None,
    final_loss: Estimate | None = None,
    restarts: Sequence[Restart] = (),
) -> RunOutcome:
    """Trains, resuming from the newest checkpoint if there is one.

    Args:
        config: The run.
        session: Distributed session of this rank.
        calibration: Records of ``paceline calibrate``, to predict the step time from.
        final_loss: Predicted final loss, if any; only rank 0's value is used.
        restarts: Earlier restarts that the metrics do not contain yet.
    """
    beat(Phase.LOAD)
    with StopRequest(config.checkpoint.grace_s) as stop:
        return _run(config, session, calibration, final_loss, restarts, stop)


def _run(
    config: RunConfig,
    session: Session,
    calibration: pathlib.Path | None,
    final_loss: Estimate | None,
    restarts: Sequence[Restart],
    stop: StopRequest,
) -> RunOutcome:
    directory = pathlib.Path(config.out)
    joined_s = time.monotonic()
    is_elastic = config.parallel.elastic == "replicas"
    num_ranks, ranks_per_host = session.world_size, session.placement.local_world_size
    if is_elastic:  # Each replica is a session of its own, and all of them are on this host.
        num_ranks = ranks_per_host = int(os.environ[NUM_REPLICAS])
    predicted = require_startable(
        config,
        num_ranks,
        usable_bytes(session.device, ranks_per_host),
        # Only rank 0 reports the predicted time, and other hosts may not have the records.
        None if session.rank else calibration,
        describe_hardware(session.device).hardware,
    )

    def open_observers() -> Observers:
        expected = expect(config, session, num_ranks, predicted, final_loss)
        return Observers(_begin(config, session, expected))

    observer: Observer
    if is_elastic:
        observer = reporter = Reporter(directory / METRICS, open_observers)
    else:
        observers = Observers([]) if session.rank else open_observers()
        observer = RestartLogger(observers, restarts, joined_s)
    try:
        train_state = build(config, session)
        checkpointer = RunCheckpointer(
            config, session, str(directory / CHECKPOINTS), str(directory / DIVERGED)
        )
        replicas = None
        if is_elastic:
            replicas = Replicas(config, train_state, session.device, reporter)
        return train(config, session, train_state, checkpointer, observer, stop, replicas)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        need = "" if predicted is None else f" (predicted: {memory_need(predicted.memory)})"
        raise OutOfMemoryError(
            f"rank {session.rank} is out of memory{need}; {MEMORY_REMEDY}"
        ) from error
    finally:
        observer.close()


def _begin(config: RunConfig, session: Session, expected: Expectation) -> list[Observer]:
    """Writes config, tokenizer, environment and expectation; returns the observers."""
    directory = pathlib.Path(config.out)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(encode_config(config), encoding="utf-8")
    open_storage(directory).write(TOKENIZER, _tokenizer(config))
    (directory / ENVIRONMENT).write_bytes(msgspec.json.encode(capture_environment()) + b"\n")
    (directory / EXPECTATION).write_bytes(msgspec.json.encode(expected) + b"\n")
    return make_observers(config, session, expected)


def require_startable(
    config: RunConfig,
    world_size: int,
    rank_bytes: int | None,
    calibration: pathlib.Path | None = None,
    hardware: str | None = None,
) -> Forecast | None:
    """Raises for errors that can be detected before any rank starts; returns the forecast.

    Args:
        config: The run.
        world_size: Number of ranks.
        rank_bytes: Device memory that each rank may use; None if unknown.
        calibration: Records of ``paceline calibrate``, to predict the step time from.
        hardware: The ranks' hardware, whose earlier runs correct the forecast.

    Returns:
        The forecast; None for models that are not Paceline's own.
    """
    require_data(config)
    require_sinks(config.logging.sinks)
    data_ranks = layout_of(config, world_size).data_parallel
    if config.training.batch_size < data_ranks:
        raise UsageError(
            f"training.batch_size {config.training.batch_size} leaves some of the "
            f"{data_ranks} ranks without a sequence; raise it, or start fewer ranks"
        )
    if config.model.hugging_face is not None:
        return None
    predicted = forecast(config, world_size, calibration, history=earlier_runs(), hardware=hardware)
    require_fit(predicted, rank_bytes)
    return predicted


def usable_bytes(device: torch.device, ranks_per_host: int) -> int | None:
    """Returns the memory that a rank may use: its whole GPU, or its part of the host's memory."""
    usable = usable_memory_bytes(device)
    if usable is None or device.type == "cuda":
        return usable
    return usable // ranks_per_host


def require_data(config: RunConfig) -> None:
    """Raises unless every dataset exists and fits the vocabulary and the run's tokenizer."""
    vocab_size, remedy = _vocabulary(config)
    for source in config.data.sources:
        manifest = read_manifest(open_storage(source.place))
        if vocab_size is not None and manifest.vocab_size > vocab_size:
            raise UsageError(
                f"{source.place} has tokens up to {manifest.vocab_size - 1:,}, but the model's "
                f"vocabulary has only {vocab_size:,}; set {remedy} to {manifest.vocab_size:,} or "
                "more"
            )
    kept = pathlib.Path(config.out) / TOKENIZER
    if kept.exists() and kept.read_bytes() != _tokenizer(config):
        raise UsageError(
            f"{kept} is not the tokenizer of {config.data.sources[0].place}; prepare the data "
            f"with --tokenizer {kept}, or change out"
        )


def _vocabulary(config: RunConfig) -> tuple[int | None, str]:
    """Returns the vocabulary size, None if unknown, and the setting that changes it."""
    if config.model.hugging_face is None:
        return config.model.shape.vocab_size, "model.vocab_size"
    directory = pathlib.Path(config.model.hugging_face)
    return read_config(directory).get("vocab_size"), f"vocab_size in {directory / 'config.json'}"


def _tokenizer(config: RunConfig) -> bytes:
    """Returns tokenizer.json of the data; all sources of a mixture share one."""
    return open_storage(config.data.sources[0].place).read(TOKENIZER)
