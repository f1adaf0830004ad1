"""Reports the progress of runs in other processes, from the last row of their metrics."""

import pathlib

import msgspec

from paceline.core.units import format_duration
from paceline.records.codecs import UNDECODABLE
from paceline.training.forecast import Forecast
from paceline.training.metrics import StepRow
from paceline.training.run_directory import EXPECTATION, METRICS

_TAIL_BYTES = 4096
"""Enough for a few rows; independent of the length of the run."""


def progress_text(directory: pathlib.Path) -> str:
    """Returns the progress of a run in a few words."""
    last, total = _last_step(directory / METRICS), _num_steps(directory / EXPECTATION)
    if last is None or total is None:
        return "starting"
    left_s = (total - last.step) * last.step_time_s
    return (
        f"step {last.step:,} of {total:,}, loss {last.loss:.3f}, about "
        f"{format_duration(left_s)} left"
    )


def _last_step(path: pathlib.Path) -> StepRow | None:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return msgspec.json.decode(line, type=StepRow)
        except UNDECODABLE:
            continue  # Another kind of row, or an incomplete one.
    return None


def _num_steps(path: pathlib.Path) -> int | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Forecast).num_steps
    except (FileNotFoundError, *UNDECODABLE):
        return None
