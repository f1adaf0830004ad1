"""Reads and writes calibration files, both bundled and user-provided.

A calibration is one JSON object with its constants, source rows, residuals and ranges. The cluster
is rebuilt from the constants, so a file stores nothing twice.
"""

import functools
import pathlib
from collections.abc import Iterable

import msgspec

from paceline.core.errors import DataError, UsageError, did_you_mean
from paceline.planner.calibrations.calibration import FrameworkCalibration, Residual
from paceline.planner.calibrations.framework_settings import device_name
from paceline.planner.calibrations.parameters import cluster_of, require_device
from paceline.predict.cost.cluster import MeasuredCorrections

_DATA = pathlib.Path(__file__).parents[1] / "data" / "calibrations.jsonl"


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    framework: str
    device: str
    precision: str
    constants: dict[str, float]
    rows: list[str]
    residuals: list[tuple[str, str, bool, float]]
    seen: dict[str, tuple[float, float]]
    cells: list[tuple[int, float]] | None = None


@functools.cache
def known_calibrations() -> tuple[FrameworkCalibration, ...]:
    """Returns the calibrations bundled with Paceline, sorted by number of rows, most first."""
    known = read_calibrations(_DATA)
    return tuple(sorted(known, key=lambda each: (-len(each.rows), each.name)))


def match_calibration(
    known: Iterable[FrameworkCalibration],
    device: str,
    precision: str,
    *,
    of_experts: bool | None = None,
    framework: str | None = None,
) -> FrameworkCalibration | None:
    """Returns the first calibration of a device and dtype; other criteria count unless None."""
    for each in known:
        if (
            (each.device, each.precision) == (device, precision)
            and of_experts in (None, each.of_experts)
            and framework in (None, each.framework)
        ):
            return each
    return None


def find_calibration(
    name: str | None, device: str, precision: str, *, of_experts: bool = False
) -> FrameworkCalibration:
    """Finds a bundled calibration by name, or the one with the most rows for a device and dtype.

    Args:
        name: Full name or framework name; None selects the calibration with the most rows.
        device: Device name in the hardware table.
        precision: dtype of matmuls, such as bfloat16.
        of_experts: Whether to find one for mixture-of-experts models instead of dense models.
    """
    everything = known = known_calibrations()
    if name is not None:
        for each in known:
            if each.name == name:
                return each
        known = tuple(each for each in known if each.framework == name)
    found = match_calibration(known, device_name(device), precision, of_experts=of_experts)
    if found is not None:
        return found
    if name is not None and not known:
        names = [each.name for each in everything]
        hint = did_you_mean(name, {*names, *(each.framework for each in everything)})
        raise UsageError(f"unknown calibration {name!r}; {hint}known: {', '.join(names)}")
    of_kind = [each for each in known or everything if each.of_experts == of_experts]
    pairs = sorted({f"{each.device} {each.precision}" for each in of_kind}) or ["none"]
    kind = "mixtures of experts" if of_experts else "dense models"
    raise UsageError(
        f"no calibration of {kind} for {device} with {precision}; there are: {', '.join(pairs)}. "
        "paceline plan calibrate makes one from your own runs"
    )


def read_calibrations(path: pathlib.Path | str) -> list[FrameworkCalibration]:
    """Reads calibrations, one per line."""
    path = pathlib.Path(path)
    if not path.exists():
        raise UsageError(f"{path}: no such file; paceline plan calibrate writes one")
    made = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            made.append(_load(msgspec.json.decode(line, type=_Stored)))
        except (msgspec.DecodeError, KeyError) as error:
            raise DataError(f"{path}, line {number}: not a calibration ({error})") from error
    return made


def write_calibrations(calibrations: Iterable[FrameworkCalibration], path: pathlib.Path) -> None:
    """Writes calibrations, one per line."""
    lines = [msgspec.json.encode(_dump(each)) for each in calibrations]
    path.write_bytes(b"\n".join(lines) + b"\n")


def _load(stored: _Stored) -> FrameworkCalibration:
    return FrameworkCalibration(
        name=stored.name,
        framework=stored.framework,
        device=stored.device,
        precision=stored.precision,
        cluster=cluster_of(
            stored.constants, require_device(stored.device), stored.precision, cells=_cells(stored)
        ),
        hidden=stored.constants["hidden"],
        rows=tuple(stored.rows),
        residuals=tuple(
            Residual(row=row, model=model, one_host=one_host, log_ratio=ratio)
            for row, model, one_host, ratio in stored.residuals
        ),
        seen=stored.seen,
        constants=stored.constants,
    )


def _cells(stored: _Stored) -> MeasuredCorrections | None:
    return None if stored.cells is None else MeasuredCorrections(entries=tuple(stored.cells))


def _dump(calibration: FrameworkCalibration) -> _Stored:
    cells = calibration.cluster.cells
    return _Stored(
        name=calibration.name,
        framework=calibration.framework,
        device=calibration.device,
        precision=calibration.precision,
        constants={name: float(f"{value:.6g}") for name, value in calibration.constants.items()},
        rows=list(calibration.rows),
        residuals=[
            (each.row, each.model, each.one_host, each.log_ratio) for each in calibration.residuals
        ],
        seen=dict(calibration.seen),
        cells=None if cells is None else list(cells.entries),
    )
