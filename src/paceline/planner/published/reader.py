"""Strict reader for the bundled published runs and for user-provided rows.

The data set has three files. `sources.json` holds each source and the fields that its rows share.
`models.json` holds the dimensions of each model. `runs.csv` holds the remaining fields, one line
per measurement. User rows are JSON Lines with the same fields. Their model is a name in
`models.json`, a preset, or given as `shape`. An unknown field, a value of the wrong type or an
impossible number raises an error that names the file and the line.

The data set contains figures, which are facts, with their sources. It copies no text from them.
"""

import csv
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import msgspec

from paceline.core.errors import DataError, UsageError
from paceline.core.presets import model_preset, preset_names
from paceline.core.specs import ModelShape
from paceline.planner.published.run import PublishedModel, PublishedRun

_DATA = pathlib.Path(__file__).parent / "data"


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A publication that rows come from."""

    where: str
    """Repository, commit and file, or the paper."""
    common: dict[str, Any] = {}
    """Fields with the same value in all rows of the source."""


@functools.cache
def published_models() -> dict[str, PublishedModel]:
    """Returns the dimensions of the published models, by name."""
    return msgspec.json.decode((_DATA / "models.json").read_bytes(), type=dict[str, PublishedModel])


@functools.cache
def sources() -> dict[str, Source]:
    """Returns the sources of the published runs, by key."""
    return msgspec.json.decode((_DATA / "sources.json").read_bytes(), type=dict[str, Source])


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Returns every published run, in file order."""
    path = _DATA / "runs.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(
            _convert(_fields(row), f"{path.name}, line {number}")
            for number, row in enumerate(csv.DictReader(file), start=2)
        )


def read_rows(path: pathlib.Path | str) -> list[PublishedRun]:
    """Reads user-provided rows: JSON Lines with the fields of `PublishedRun`."""
    path = pathlib.Path(path)
    if not path.exists():
        raise UsageError(f"{path}: no such file; give JSON Lines, one measured run per line")
    return list(_read_lines(path))


def model_of(run: PublishedRun) -> PublishedModel | ModelShape | None:
    """Returns the dimensions of a run's model; None if they are unknown."""
    if run.shape is not None:
        return run.shape
    if run.model in published_models():
        return published_models()[run.model]
    return model_preset(run.model) if run.model in preset_names() else None


def _read_lines(path: pathlib.Path) -> Iterator[PublishedRun]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = msgspec.json.decode(line.encode())
        except msgspec.DecodeError as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        if not isinstance(fields, dict):
            raise DataError(f"{where}: not a JSON object; one measured run per line")
        run = _convert({"id": f"line {number}", "source": path.name, **fields}, where)
        if model_of(run) is None:
            raise DataError(
                f"{where}: unknown model {run.model!r}; name a preset, or give its shape"
            )
        yield run


def _fields(row: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of a CSV row, merged with the common fields of its source."""
    fields: dict[str, Any] = {name: cell for name, cell in row.items() if cell != ""}
    if "also" in fields:
        fields["also"] = dict(pair.split("=") for pair in fields["also"].split(";"))
    if "marks" in fields:
        fields["marks"] = fields["marks"].split(";")
    return {**sources()[row["source"]].common, **fields}


def _convert(fields: dict[str, Any], where: str) -> PublishedRun:
    try:
        return msgspec.convert(fields, PublishedRun, strict=False)
    except (msgspec.ValidationError, DataError) as error:
        raise DataError(f"{where}: {error}") from error
