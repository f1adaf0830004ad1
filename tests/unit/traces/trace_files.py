"""Small traces for tests, in torch's format."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec


class Span(msgspec.Struct, frozen=True):
    """A trace event; times are in microseconds."""

    category: str
    name: str
    start: float
    duration: float
    thread: int = 1
    process: int = 0
    input_dims: tuple[tuple[int, ...], ...] = ()
    operator: object = None
    """The operator's number, or that of the operator that launched a kernel."""

    def as_event(self) -> dict[str, Any]:
        """Returns the event in the JSON form of a trace."""
        event: dict[str, Any] = {
            "ph": "X",
            "cat": self.category,
            "name": self.name,
            "pid": self.process,
            "tid": self.thread,
            "ts": self.start,
            "dur": self.duration,
        }
        if self.input_dims:
            event["args"] = {"External id": 1, "Input Dims": self.input_dims}
        if self.operator is not None:
            event.setdefault("args", {})["External id"] = self.operator
        return event


def rank_name(process: int, rank: int) -> dict[str, Any]:
    """Returns the event that assigns a process to a rank."""
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"rank {rank}"}}


def write_trace(path: pathlib.Path, spans: Sequence[Span], *extra: dict[str, Any]) -> pathlib.Path:
    """Writes a trace and returns its path."""
    trace = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0}, {"id": 1}],
        "traceEvents": [*extra, *(span.as_event() for span in spans)],
        "traceName": "of a test",
        "baseTimeNanoseconds": 1_000_000,
    }
    path.write_text(json.dumps(trace, indent=1))
    return path
