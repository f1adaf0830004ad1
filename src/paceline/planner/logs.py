"""Step times in what trainers leave behind, for rows of `paceline plan calibrate`.

A row may name a `log` instead of a measured value. What is read, recognized by its content:

    torchtitan         "step: 10 ... tps: 5,762": tokens per second and device
    Megatron-LM        "elapsed time per iteration (ms): 356.2"
    Megatron-Bridge    "Step Time : 14.26s"
    NeMo               "train_step_timing in s: 7.2" or "=7.2"
    TensorBoard        an event file or a directory with some, with one of the series below
    Weights & Biases   the CSV export of a chart, or the history as JSON Lines, with such a series
    Paceline           record.jsonl of a finished run, or the run's directory

The value is the median of all steps but the first tenth, at least one: the first steps compile,
allocate and fill caches. A Megatron-LM log also states its arguments, and a record of Paceline its
case; fields that the row leaves out are taken from there.
"""

import csv
import dataclasses
import io
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.core.errors import UsageError
from paceline.core.files import read_named

_SERIES: dict[str, str] = {
    "throughput(tps)": "tokens/s/device",
    "tps": "tokens/s/device",
    "time_metrics/end_to_end(s)": "s/iteration",
    "train_step_timing in s": "s/iteration",
    "iteration-time": "s/iteration",
    "step_time_s": "s/iteration",
}
"""Names of series, with their unit in a row; the first that exists is taken."""

_NUMBER = r"([0-9][0-9,]*\.?[0-9]*(?:e[-+]?[0-9]+)?)"
_LINES: tuple[tuple[str, str, float], ...] = (
    (rf"\btps:\s*{_NUMBER}", "tokens/s/device", 1),
    (rf"elapsed time per iteration \(ms\):\s*{_NUMBER}", "s/iteration", 1e-3),
    (rf"Step Time\s*:\s*{_NUMBER}\s*s", "s/iteration", 1),
    (rf"train_step_timing in s\s*[:=]\s*{_NUMBER}", "s/iteration", 1),
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ARGUMENT = re.compile(r"^\s*(?:\[?\S*?\]?:?)?\s*(\w+) \.{3,} (\S+)\s*$", re.MULTILINE)
_SKIPPED = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What a log says about a run."""

    unit: str
    """The unit of `measured`, as in a row."""
    measured: float
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of a row that the log states."""


def read_log(path: pathlib.Path) -> LoggedRun:
    """Reads a log, an export or a run's directory; raises if it has no step times."""
    if path.is_dir():
        if (path / "record.jsonl").exists():
            return _of_record(path / "record.jsonl")
        return _of_series(_tensorboard(path), path)
    if ".tfevents." in path.name and path.exists():
        return _of_series(_tensorboard(path), path)
    content = read_named(path, "name a trainer's log or its exported metrics")
    text = content.decode(errors="replace")
    if objects := _objects(text):
        if objects[0].get("kind") == "training_run":
            return _of_record(path)
        return _of_history(objects, path)
    found = _of_csv(text, path) or _of_lines(text)
    if found is not None:
        return found
    raise UsageError(
        f"{path}: no step times in it; known are logs of torchtitan, Megatron-LM, Megatron-Bridge "
        "and NeMo, event files of TensorBoard, exports of Weights & Biases, and records of Paceline"
    )


def _median_after_start(values: list[float]) -> float:
    skipped = min(max(1, round(_SKIPPED * len(values))), len(values) - 1)
    return statistics.median(values[skipped:])


def _of_lines(text: str) -> LoggedRun | None:
    plain = _COLOURS.sub("", text)
    for pattern, unit, factor in _LINES:
        values = [float(found.replace(",", "")) for found in re.findall(pattern, plain)]
        values = [value for value in values if value > 0]
        if values:
            measured = _median_after_start(values) * factor
            return LoggedRun(unit=unit, measured=measured, fields=_megatron_fields(plain))
    return None


_MEGATRON: dict[str, str] = {
    "world_size": "devices",
    "seq_length": "context_length",
    "global_batch_size": "global_batch",
    "micro_batch_size": "micro_batch",
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "data_parallel_size": "data",
    "virtual_pipeline_model_parallel_size": "interleave",
}
"""Arguments of Megatron-LM by the field of a row that they are."""


def _megatron_fields(text: str) -> dict[str, Any]:
    arguments = dict(_ARGUMENT.findall(text))
    fields: dict[str, Any] = {
        field: int(arguments[name])
        for name, field in _MEGATRON.items()
        if arguments.get(name, "").isdecimal()
    }
    for name, field, values in (
        ("sequence_parallel", "sequence_parallel", {"True": True, "False": False}),
        ("use_distributed_optimizer", "zero", {"True": 1, "False": 0}),
        ("recompute_granularity", "recompute", {"full": "full", "selective": "selective"}),
    ):
        if arguments.get(name) in values:
            fields[field] = values[arguments[name]]
    return fields


def _of_csv(text: str, path: pathlib.Path) -> LoggedRun | None:
    """Reads the export of a chart: a column per run, named "RUN - SERIES"."""
    rows = list(csv.reader(io.StringIO(text)))
    if len(rows) < 2 or len(rows[0]) < 2:
        return None
    for name, unit in _SERIES.items():
        places = [
            place
            for place, header in enumerate(rows[0])
            if header.rpartition(" - ")[2].strip() == name
        ]
        if len(places) > 1:
            raise UsageError(
                f"{path}: {len(places)} runs in one export; export each run by itself, one row each"
            )
        if places:
            cells = (row[places[0]] for row in rows[1:] if len(row) > places[0])
            values = [value for value in map(_positive, cells) if value is not None]
            return LoggedRun(unit=unit, measured=_median_after_start(values)) if values else None
    return None


def _of_history(rows: Iterable[Mapping[str, Any]], path: pathlib.Path) -> LoggedRun:
    """Reads a run's history: an object of metrics per step."""
    series: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if (number := _positive(value)) is not None:
                series.setdefault(name, []).append(number)
    return _of_series(series, path)


def _of_series(series: Mapping[str, list[float]], path: pathlib.Path) -> LoggedRun:
    for name, unit in _SERIES.items():
        for known, values in series.items():
            if known == name or known.endswith(f"/{name}"):
                return LoggedRun(unit=unit, measured=_median_after_start(values))
    shown = ", ".join(list(series)[:8]) or "none"
    raise UsageError(f"{path}: none of the series {', '.join(_SERIES)} is in it; it has {shown}")


_CASE = {
    "world_size": "devices",
    "context": "context_length",
    "batch_size": "global_batch",
    "batch": "micro_batch",
}


def _of_record(path: pathlib.Path) -> LoggedRun:
    from paceline.records import RecordStore

    records = [each for each in RecordStore(path).read() if each.kind == "training_run"]
    if not records or "step_time_s" not in records[-1].metrics:
        raise UsageError(f"{path}: no record of a finished run; it is written when a run ends")
    record = records[-1]
    fields = {field: record.case[name] for name, field in _CASE.items() if name in record.case}
    return LoggedRun(
        unit="s/iteration",
        measured=record.metrics["step_time_s"].value,
        fields={"framework": "paceline", **fields},
    )


def _tensorboard(path: pathlib.Path) -> dict[str, list[float]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{path}: event files need the package tensorboard; pip install 'paceline[tensorboard]'"
        ) from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    read: Callable[[str], Any] = events.Scalars
    return {name: [float(each.value) for each in read(name)] for name in events.Tags()["scalars"]}


def _objects(text: str) -> list[dict[str, Any]]:
    """Returns JSON objects, one per line; none if any line is something else."""
    found = []
    for line in filter(str.strip, text.splitlines()):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return []
        if not isinstance(row, dict):
            return []
        found.append(row)
    return found


def _positive(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < float("inf") else None
