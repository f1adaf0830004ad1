"""Tracks a run's progress through the metrics file, which gets a row after every step."""

import pathlib
import time

import msgspec

from paceline.records.codecs import UNDECODABLE
from paceline.training.run_files import METRICS

_TAIL_BYTES = 1 << 16


class Progress:
    """Polls a run's newest step, and records the time at which each step was reached."""

    def __init__(self, run: pathlib.Path, began: float) -> None:
        self._path = run / METRICS
        self._began = began
        self.step = 0
        self.seconds: list[float] = [0.0]
        self.steps: list[int] = [0]
        self.advanced_s = 0.0
        """When the step last increased, in seconds since the start."""

    def look(self) -> int:
        """Returns the newest step; 0 before the first one."""
        step = self._newest()
        now_s = time.monotonic() - self._began
        if step > self.step:
            self.advanced_s = now_s
        if step != self.step:
            # Before a rollback, repeat the old step at the current time, so that a plot shows the
            # pause as a horizontal line.
            self.seconds += [now_s, now_s] if step < self.step else [now_s]
            self.steps += [self.step, step] if step < self.step else [step]
            self.step = step
        return step

    def _newest(self) -> int:
        try:
            with self._path.open("rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - _TAIL_BYTES))
                lines = file.read().split(b"\n")
        except OSError:
            return 0
        # The last part is empty or an incomplete line.
        for line in reversed(lines[:-1]):
            try:
                row = msgspec.json.decode(line)
            except UNDECODABLE:
                continue
            if isinstance(row, dict) and row.get("kind") == "step":
                return int(row["step"])
        return 0
