"""Runs training on one rank: checks the run, creates its directory and model, enters the loop.

A signal that asks the run to stop sets a flag, which ranks check between steps. A rank may be
inside a collective, where Python's signal handlers do not run. A thread therefore reads the pipe
that the interpreter writes to when a signal arrives. The thread sets the flag, and ends the process
at a second signal or when the time for saving is over.
"""

import os
import pathlib
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn, Self

import msgspec
import torch
from rich.console import Console

from paceline.accounting.model_config import read_config_json
from paceline.core.errors import PacelineError, UsageError, is_out_of_memory
from paceline.core.plan import Estimate
from paceline.core.processes import note_stop_request, stop_code, stop_signals
from paceline.core.specs import precision_preset
from paceline.data.manifest import TOKENIZER, read_manifest
from paceline.data.storage import open_storage
from paceline.devices.hardware import (
    describe_hardware,
    memory_limit_bytes,
    peak_flops,
    usable_memory_bytes,
)
from paceline.parallel import Session
from paceline.parallel.ranks.heartbeats import Phase, beat
from paceline.parallel.ranks.supervisor import Restart
from paceline.records.environment import capture_environment
from paceline.training.config import RunConfig
from paceline.training.forecast import (
    MEMORY_REMEDY,
    Forecast,
    ResolvedRun,
    memory_need,
    require_fit,
    resolve,
)
from paceline.training.loop import RunOutcome, train
from paceline.training.metrics import MetricsFile
from paceline.training.observers import (
    FileObserver,
    LogObserver,
    Observer,
    Observers,
    RecordObserver,
    RestartLogger,
)
from paceline.training.panel import PanelObserver
from paceline.training.parallelize import build
from paceline.training.replica_launch import NUM_REPLICAS
from paceline.training.replicas import Replicas, Reporter
from paceline.training.run_checkpointer import RunCheckpointer
from paceline.training.run_directory import CONFIG, ENVIRONMENT, EXPECTATION, METRICS
from paceline.training.sinks import make_sinks, require_sinks
from paceline.training.toml_config import encode_config


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
    joined_s = time.monotonic()
    directory = pathlib.Path(config.out)
    is_elastic = config.parallel.elastic == "replicas"
    num_ranks, ranks_per_host = session.world_size, session.placement.local_world_size
    if is_elastic:  # Each replica is a session of its own, and all of them are on this host.
        num_ranks = ranks_per_host = int(os.environ[NUM_REPLICAS])
    with StopRequest(config.checkpoint.grace_s) as stop:
        resolved = require_startable(
            config,
            num_ranks,
            usable_bytes(session.device, ranks_per_host),
            # Only rank 0 reports the predicted time, and other hosts may not have the records.
            None if session.rank else calibration,
            describe_hardware(session.device).hardware,
            on_accelerator=session.device.type != "cpu",
        )

        def open_observers() -> Observers:
            return _open_observers(resolved, session, final_loss)

        observer: Observer
        if is_elastic:
            observer = reporter = Reporter(directory / METRICS, open_observers)
        else:
            observers = Observers([]) if session.rank else open_observers()
            observer = RestartLogger(observers, restarts, joined_s)
        try:
            train_state = build(config, resolved.layout, session)
            checkpointer = RunCheckpointer(config, session)
            replicas = None
            if is_elastic:
                replicas = Replicas(config, train_state, session.device, reporter)
            return train(
                config,
                session,
                train_state,
                checkpointer,
                observer,
                lambda: stop.received is not None,
                replicas,
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            need = memory_need(resolved.forecast)
            predicted = f" (predicted: {need})" if need else ""
            raise OutOfMemoryError(
                f"rank {session.rank} is out of memory{predicted}; {MEMORY_REMEDY}"
            ) from error
        finally:
            observer.close()


def require_startable(
    config: RunConfig,
    num_ranks: int,
    rank_bytes: int | None,
    calibration: pathlib.Path | None = None,
    hardware: str | None = None,
    *,
    on_accelerator: bool | None = None,
) -> ResolvedRun:
    """Resolves a run, or raises for errors that can be detected before any rank starts.

    `rank_bytes` is the device memory that each rank may use; None if unknown. Earlier runs on the
    same hardware correct the forecast, whose other arguments are as in `forecast`.
    """
    require_data(config)
    require_sinks(config.logging.sinks)
    resolved = resolve(config, num_ranks, calibration, hardware, on_accelerator=on_accelerator)
    data_ranks = resolved.layout.data_parallel
    if config.training.batch_size < data_ranks:
        raise UsageError(
            f"training.batch_size {config.training.batch_size} leaves some of the "
            f"{data_ranks} ranks without a sequence; raise it, or start fewer ranks"
        )
    require_fit(resolved.forecast, rank_bytes)
    return resolved


def _open_observers(
    resolved: ResolvedRun, session: Session, final_loss: Estimate | None
) -> Observers:
    """Writes config, tokenizer, environment and forecast; returns the observers of the run.

    These are metrics file, record, a panel if stderr is a terminal and otherwise a log, and
    trackers.
    """
    config, directory = resolved.config, pathlib.Path(resolved.config.out)
    expected = expect(resolved, session, final_loss)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(encode_config(config), encoding="utf-8")
    open_storage(directory).write(TOKENIZER, _tokenizer(config))
    (directory / ENVIRONMENT).write_bytes(msgspec.json.encode(capture_environment()) + b"\n")
    (directory / EXPECTATION).write_bytes(msgspec.json.encode(expected) + b"\n")
    console = Console(stderr=True)
    shown: Observer = LogObserver(config.logging.every_steps, expected)
    if console.is_terminal and not console.is_dumb_terminal:
        shown = PanelObserver(directory.name, expected, console)
    return Observers(
        [
            FileObserver(MetricsFile(directory / METRICS)),
            RecordObserver(resolved, session, expected),
            shown,
            *make_sinks(config, directory, expected),
        ]
    )


def expect(resolved: ResolvedRun, session: Session, final_loss: Estimate | None = None) -> Forecast:
    """Returns the forecast of a run, with the limits of these ranks."""
    precision = precision_preset(resolved.config.training.precision)
    peak = peak_flops(describe_hardware(session.device), precision)
    limit = memory_limit_bytes(session.device)
    if limit is not None and session.device.type == "cpu":
        limit //= session.placement.local_world_size  # Local ranks share one memory.
    return msgspec.structs.replace(
        resolved.forecast,
        peak_flops_per_s=None if peak is None else peak * resolved.layout.world_size,
        memory_limit_bytes=limit,
        final_loss=final_loss,
    )


def usable_bytes(device: torch.device, ranks_per_host: int) -> int | None:
    """Returns the memory that a rank may use: its whole GPU, or its part of the host's memory."""
    usable = usable_memory_bytes(device)
    if usable is None or device.type != "cpu":
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
    found = read_config_json(directory).get("vocab_size")
    return found, f"vocab_size in {directory / 'config.json'}"


def _tokenizer(config: RunConfig) -> bytes:
    """Returns tokenizer.json of the data; all sources of a mixture share one."""
    return open_storage(config.data.sources[0].place).read(TOKENIZER)


_SAME_REQUEST_S = 1.0
"""Signals within this time are one request: a launcher forwards signals that its process group has
already received."""
_REPEATED = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to a rank, and its launcher once more, at any time later."""
_CLOSE = 0
"""Byte that ends the thread; no signal has this number."""
_SHOW_CURSOR = "\x1b[?25h"
"""Shows the cursor, which a panel hides."""


class StopRequest:
    """Records SIGTERM, SIGUSR1 (Slurm's warning), SIGINT and SIGHUP while it is open.

    Nothing is saved inside a handler. A second SIGTERM or SIGUSR1 ends the process at once with
    exit code 143; a second SIGINT interrupts as usual, and a second SIGHUP changes nothing.
    """

    def __init__(self, grace_s: float) -> None:
        self.received: signal.Signals | None = None
        self._grace_s = grace_s
        self._first_s = 0.0
        self._num_interrupts = 0
        self._signals = stop_signals()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = {each: signal.signal(each, self._handle) for each in self._signals}
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="stop-request", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for each, handler in self._before.items():
            signal.signal(each, handler)
        os.write(self._writer, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Runs on the main thread, possibly late. Without a handler, no byte reaches the pipe."""
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1 and self._is_another():
                raise KeyboardInterrupt

    def _watch(self) -> None:
        while True:
            left_s = None
            if self.received is not None:
                left_s = max(0.0, self._first_s + self._grace_s - time.monotonic())
            ready, _, _ = select.select([self._reader], [], [], left_s)
            if not ready:
                _leave(f"not saved within the {self._grace_s:g} s of checkpoint.grace_s")
            for number in os.read(self._reader, 64):
                if number == _CLOSE:
                    return
                if number not in self._signals:
                    continue
                note_stop_request(number)
                if self.received is None:
                    self._first_s = time.monotonic()
                    self.received = signal.Signals(number)
                elif number not in _REPEATED and self._is_another():
                    _leave(f"not saved: a second {signal.Signals(number).name}")

    def _is_another(self) -> bool:
        is_later = time.monotonic() - self._first_s >= _SAME_REQUEST_S
        return self.received is not None and is_later


def _leave(why: str) -> NoReturn:
    shown = _SHOW_CURSOR if sys.stderr.isatty() else ""
    os.write(2, f"{shown}paceline: {why}; resume from the last checkpoint\n".encode())
    os._exit(stop_code())
