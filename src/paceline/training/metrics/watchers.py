"""Creates the observers of a run on its first rank, and the expectation that they receive."""

import pathlib

import msgspec
from rich.console import Console

from paceline.core.plan import Estimate
from paceline.core.specs import precision_preset
from paceline.parallel import Session
from paceline.parallel.ranks.hardware import describe_hardware, memory_limit_bytes, peak_flops
from paceline.training.config import RunConfig
from paceline.training.forecast import forecast
from paceline.training.metrics.expectation import Expectation
from paceline.training.metrics.observers import FileObserver, LogObserver, Observer
from paceline.training.metrics.panel import PanelObserver
from paceline.training.metrics.record import RecordObserver
from paceline.training.metrics.rows import MetricsFile
from paceline.training.metrics.sinks import make_sinks
from paceline.training.run_files import METRICS


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
    calibration: pathlib.Path | None,
    final_loss: Estimate | None = None,
) -> Expectation:
    """Returns the predictions and limits of a run on these ranks before its first step.

    Args:
        config: The run.
        session: Distributed session of rank 0.
        calibration: Records of ``paceline calibrate``, to predict the step time from.
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
        peak_flops_per_s=None if peak is None else peak * session.world_size,
        memory_limit_bytes=limit,
        final_loss=final_loss,
    )
    if config.model.hugging_face is not None:  # Nothing is predicted for other models.
        return known
    predicted = forecast(config, session.world_size, calibration)
    return msgspec.structs.replace(
        known,
        flops_per_step=predicted.flops / predicted.num_steps,
        memory_bytes=None if predicted.memory is None else predicted.memory.total,
        step_time_s=predicted.step_time_s,
    )


def _panel_or_log(config: RunConfig, expected: Expectation) -> Observer:
    """Returns a panel if stderr is a terminal, otherwise a log."""
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return PanelObserver(pathlib.Path(config.out).name, expected, console)
    return LogObserver(config.logging.every_steps, expected)
