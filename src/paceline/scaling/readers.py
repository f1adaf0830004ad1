"""Reads sweeps from JSON, JSON Lines and CSV files, and from records of runs.

The suffix determines the format. A JSON object with a `schema` field is read as a record, whose
parameters are those of the model in its case. A top-level JSON object maps names to sweeps, each
with `runs` that are objects, or arrays of compute, parameters, tokens and loss.
"""

import csv
import io
import json
import os
import pathlib
from collections.abc import Mapping

from paceline.accounting.counts import count_parameters
from paceline.core.errors import UsageError
from paceline.records.schema import missing_model_fields, model_of_case
from paceline.scaling.sweep import Sweep, sweep_from_rows

_ARRAY_FIELDS = ("compute_budget", "parameters", "tokens", "final_loss")


def read_sweep(path: str | os.PathLike[str], *, name: str | None = None) -> Sweep:
    """Reads the runs of a .json, .jsonl or .csv file at `path`.

    Args:
        path: The file.
        name: Name of the sweep, for a JSON file with several.
    """
    return sweep_from_rows(read_rows(pathlib.Path(path), name), str(path))


def read_rows(path: pathlib.Path, name: str | None = None) -> list[Mapping[str, object]]:
    """Reads a file's rows without validating them; raises an error if there are none."""
    readers = {".json": _read_json, ".jsonl": _read_json_lines, ".csv": _read_csv}
    if path.suffix not in readers:
        raise UsageError(f"{path}: cannot tell its format; name it .json, .jsonl or .csv")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: cannot read the runs: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file: {error.reason}") from error
    try:
        rows = readers[path.suffix](text, str(path), name)
    except (csv.Error, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise UsageError(f"{path}: contains no runs")
    return rows


def _read_json(text: str, source: str, name: str | None) -> list[Mapping[str, object]]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{source}: not valid JSON: {error}") from error
    if isinstance(content, dict):
        content = _named_runs(content, source, name)
    else:
        _require_unnamed(source, name)
    if not isinstance(content, list):
        raise UsageError(f"{source}: a JSON array of runs is expected")
    return [_row(entry, f"{source}: row {number}") for number, entry in enumerate(content, start=1)]


def _named_runs(sweeps: Mapping[str, object], source: str, name: str | None) -> object:
    """Returns the runs of the named sweep in a file."""
    known = [key for key, value in sweeps.items() if isinstance(value, dict) and "runs" in value]
    if not known:
        raise UsageError(f"{source}: a JSON array of runs is expected, or sweeps by name")
    if name is None and len(known) == 1:
        name = known[0]
    if name not in known:
        raise UsageError(
            f"{source}: contains the sweeps {', '.join(known)}; name one of them with --sweep"
        )
    runs = sweeps[name]["runs"]  # type: ignore[index]
    return [_row_of_array(run) for run in runs] if isinstance(runs, list) else runs


def _row_of_array(run: object) -> object:
    """Converts a run given as an array of four numbers to a row; returns others unchanged."""
    if not isinstance(run, list) or len(run) != len(_ARRAY_FIELDS):
        return run
    return dict(zip(_ARRAY_FIELDS, run, strict=True))


def _read_json_lines(text: str, source: str, name: str | None) -> list[Mapping[str, object]]:
    _require_unnamed(source, name)
    rows = []
    for number, line in enumerate((line for line in text.split("\n") if line.strip()), start=1):
        where = f"{source}: row {number}"
        try:
            entry = json.loads(line)
            # Skip the answer that a design prints after its runs.
            if not (isinstance(entry, dict) and entry.get("kind") == "scaling"):
                rows.append(_row(entry, where))
        except ValueError as error:
            raise UsageError(f"{where}: not valid JSON: {error}") from error
    return rows


def _read_csv(text: str, source: str, name: str | None) -> list[Mapping[str, object]]:
    _require_unnamed(source, name)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: list[Mapping[str, object]] = []
    for number, entry in enumerate(reader, start=1):
        if None in entry or None in entry.values():
            raise UsageError(
                f"{source}: row {number}: the number of cells differs from the number of headers"
            )
        rows.append({field.strip(): cell.strip() for field, cell in entry.items()})
    return rows


def _require_unnamed(source: str, name: str | None) -> None:
    if name is not None:
        raise UsageError(
            f"{source}: contains one sweep without a name; leave out the name {name!r}"
        )


def _row(entry: object, where: str) -> Mapping[str, object]:
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: an object with the run's fields is expected")
    return _row_of_record(entry, where) if "schema" in entry else entry


def _row_of_record(record: Mapping[str, object], where: str) -> Mapping[str, object]:
    case, metrics = record.get("case"), record.get("metrics")
    if not isinstance(case, dict) or not isinstance(metrics, dict):
        raise UsageError(f"{where}: a record needs case and metrics")
    row: dict[str, object] = {"outcome": record.get("outcome")}
    row["parameters"] = case["parameters"] if "parameters" in case else _parameters(case, where)
    for field in ("tokens", "compute_budget", "final_loss", "cost"):
        if field in metrics:
            metric = metrics[field]
            row[field] = metric.get("value") if isinstance(metric, dict) else metric
        elif field in case:
            row[field] = case[field]
    return row


def _parameters(case: Mapping[str, object], where: str) -> int:
    shape = model_of_case(case)
    if shape is None:
        missing = missing_model_fields(case)[0]
        raise UsageError(f"{where}: case.{missing} is missing, so its parameters are not known")
    return count_parameters(shape).total
