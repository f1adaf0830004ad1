"""Tables of plans: layouts, budgets and advice, framework calibrations, predicted memory."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.accounting.memory.step import MemoryParts
from paceline.core.units import format_binary_bytes, format_count, format_duration, to_gibibytes
from paceline.planner.calibrations.calibration import FrameworkCalibration
from paceline.planner.search.advice import Change, Comparison, not_told_apart
from paceline.planner.search.budget import Budget, BudgetPoint, RunEstimate
from paceline.planner.search.search import BOUNDS, Candidate, SearchResult
from paceline.records.schema import interval_ends
from paceline.reports.tables.table import NOT_APPLICABLE, Table


def search_table(
    result: SearchResult, runs: Sequence[RunEstimate] | None = None, notes: Sequence[str] = ()
) -> Table:
    """Returns a row for the best layout of every mesh, the fastest first."""
    spec, estimates = result.spec, runs or ()
    alike = not_told_apart(result.choices)
    columns: dict[str, Callable[[tuple[int, Candidate]], object]] = {
        "": lambda each: f"{each[0] + 1}{'≈' if each[0] < alike and alike > 1 else ''}",
        "layout": lambda each: each[1].name,
        "step": lambda each: _seconds(each[1].step_time_s.value),
        "90% interval": lambda each: " to ".join(map(_seconds, interval_ends(each[1].step_time_s))),
        "MFU": lambda each: NOT_APPLICABLE if each[1].mfu is None else f"{each[1].mfu:.1%}",
        "memory": lambda each: f"{to_gibibytes(each[1].peak_bytes):.1f} GiB",
        "free": lambda each: f"{each[1].headroom:.0%}",
        "bound by": lambda each: _bound(each[1]),
        "bubble": lambda each: f"{each[1].bubble_share:.1%}",
        "exposed": lambda each: f"{each[1].exposed_share:.1%}",
    }
    if estimates:
        columns["days"] = lambda each: f"{estimates[each[0]].days:.3g}"
        columns["goodput"] = lambda each: f"{estimates[each[0]].goodput:.1%}"
        columns["device-hours"] = lambda each: _count(estimates[each[0]].device_hours)
        if estimates[0].cost is not None:
            columns["cost"] = lambda each: _count(estimates[each[0]].cost)
    return Table.of(
        enumerate(result.choices),
        columns,
        caption=(
            f"{result.num_candidates:,} layouts of {spec.num_devices:,} devices, "
            f"{result.num_fitting:,} fit; the best of each mesh, in {result.elapsed_s:.1f} s"
        ),
        notes=(
            *_alike_note(alike, result.choices),
            *_idle_note(result),
            *notes,
            *_outside_note(result.best),
        ),
    )


def _count(number: float | None) -> str:
    return "" if number is None else format_count(round(number))


def _bound(choice: Candidate) -> str:
    share = choice.parts[choice.bound] / choice.step_time_s.value
    return f"{choice.bound} {share:.0%}"


def _alike_note(alike: int, found: Sequence[Candidate]) -> tuple[str, ...]:
    if alike < 2:
        return ()
    everything = "all of these" if alike == len(found) else f"the first {alike}"
    return (f"≈ {everything} cannot be told apart: measure 20 steps of each.",)


def _outside_note(best: Candidate) -> tuple[str, ...]:
    if not best.outside:
        return ()
    reached = "; ".join(
        each.removesuffix(", the range of the measured runs") for each in best.outside
    )
    return (f"The interval is wider because no measured run is similar: {reached}.",)


def _idle_note(result: SearchResult) -> tuple[str, ...]:
    idle = result.spec.num_devices - result.best.devices
    if not idle:
        return ()
    return (f"The first uses {result.best.devices:,} devices; {idle:,} are left as spares.",)


def comparison_table(comparison: Comparison) -> Table:
    """Returns a row per time and memory term, with two layouts side by side."""
    best, other = comparison.best, comparison.other
    limit = "" if comparison.fits else ", were memory no limit"
    rows = [
        (
            BOUNDS.get(term, term.removesuffix("_s")) + _detail(term),
            _seconds(seconds),
            _seconds(other.terms_s[term]),
            f"{(other.terms_s[term] - seconds) / best.step_time_s.value:+.1%}",
        )
        for term, seconds in best.terms_s.items()
        if seconds or other.terms_s[term]
    ]
    rows.append(
        (
            "step",
            _seconds(best.step_time_s.value),
            _seconds(other.step_time_s.value),
            f"{comparison.slowdown:+.1%}",
        )
    )
    rows += [
        (
            f"memory: {part}",
            f"{to_gibibytes(size):.1f} GiB",
            f"{to_gibibytes(other.memory_bytes[part]):.1f} GiB",
            f"{to_gibibytes(other.memory_bytes[part] - size):+.1f} GiB",
        )
        for part, size in best.memory_bytes.items()
        if size or other.memory_bytes[part]
    ]
    return Table(
        headers=("", "best", comparison.asked, "difference"),
        rows=tuple(rows),
        caption=(
            f"Why not {comparison.asked}? {comparison.reason}.\n"
            f"best: {best.name}; {comparison.asked}{limit}: {other.name}"
        ),
    )


def _detail(term: str) -> str:
    return " of the optimizer" if term == "optimizer_s" else ""


def advice_table(changes: Sequence[Change]) -> Table:
    """Returns a row per change in the given order, largest speedup first."""
    return Table.of(
        changes,
        {
            "with": lambda change: change.what,
            "tokens/s": lambda change: f"{change.speedup:.2f}x",
            "device-hours": lambda change: f"{change.device_hours - 1:+.1%}",
            "best layout then": lambda change: change.choice.name,
        },
        caption="What would help: the search again, with one thing changed",
    )


def run_lines(run: RunEstimate) -> tuple[str, ...]:
    """Returns sentences on the duration, device-hours, interruptions and cost of a run."""
    spares = f" and {run.spare_hosts} spare hosts" if run.spare_hosts else ""
    lines = [
        f"{run.tokens:.3g} tokens in {run.steps:,} steps: {run.days:.3g} days "
        f"({run.days_without_failures:.3g} without failures, goodput {run.goodput:.1%}), "
        f"{_count(run.device_hours)} device-hours{spares}.",
        f"About {run.interruptions:.0f} interruptions; save every "
        f"{format_duration(run.checkpoint_interval_s)}.",
    ]
    if run.cost is not None:
        lines.append(f"Cost: {_count(run.cost)}.")
    return tuple(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def budget_table(found: Budget, model: str, device: str, notes: Sequence[str] = ()) -> Table:
    """Returns a row per number of devices; the smallest and the cheapest in time are marked."""
    columns: dict[str, Callable[[BudgetPoint], object]] = {
        "devices": lambda point: f"{point.devices:,}",
        "": lambda point: _marks(found, point),
        "days": lambda point: f"{point.run.days:.3g}",
        "90% interval": _days_interval,
        "goodput": lambda point: f"{point.run.goodput:.1%}",
        "device-hours": lambda point: _count(point.run.device_hours),
    }
    if found.points[0].run.cost is not None:
        columns["cost"] = lambda point: _count(point.run.cost)
    columns |= {
        "stops": lambda point: f"{point.run.interruptions:.0f}",
        "save every": lambda point: format_duration(point.run.checkpoint_interval_s),
        "spare hosts": lambda point: point.run.spare_hosts,
        "MFU": lambda point: "" if point.choice.mfu is None else f"{point.choice.mfu:.1%}",
        "layout": lambda point: point.choice.name,
    }
    return Table.of(
        found.points,
        columns,
        caption=(f"{found.tokens:.3g} tokens by day {found.deadline_days:g} on {device}: {model}"),
        notes=(
            f"smallest: {found.smallest.devices:,} devices, {found.smallest.run.days:.3g} days; "
            f"cheapest: {found.cheapest.devices:,} devices, "
            f"{_count(found.cheapest.run.device_hours)} device-hours.",
            *notes,
        ),
    )


def _marks(found: Budget, point: BudgetPoint) -> str:
    marks = {
        "smallest": point is found.smallest,
        "cheapest": point is found.cheapest,
        "too late": not point.in_time,
    }
    return ", ".join(name for name, is_marked in marks.items() if is_marked)


def _days_interval(point: BudgetPoint) -> str:
    time = point.choice.step_time_s
    low, high = (point.run.days * end / time.value for end in interval_ends(time))
    return f"{low:.3g} to {high:.3g}"


def calibrations_table(calibrations: Sequence[FrameworkCalibration]) -> Table:
    """Returns a row per calibration."""
    return Table.of(
        calibrations,
        {
            "calibration": lambda each: each.name,
            "rows": lambda each: len(each.rows),
            "matmuls (of peak)": lambda each: f"{each.constants['matmul_share']:.0%}",
            "attention (of peak)": _attention_share,
            "memory (of bandwidth)": lambda each: f"{each.constants['memory_share']:.0%}",
            "held-out error, mean": lambda each: _held_out_error(each, np.mean),
            "largest": lambda each: _held_out_error(each, np.max),
            "90% interval": _calibrated_interval,
        },
        caption="Shares of what the vendor states; errors of rows while their model was held out",
    )


def _attention_share(calibration: FrameworkCalibration) -> str:
    share = calibration.constants.get("attention_share")
    return "as matmuls" if share is None else f"{share:.0%}"


def _held_out_error(
    calibration: FrameworkCalibration, summarize: Callable[[np.ndarray], float]
) -> str:
    ratios = np.array([each.log_ratio for each in calibration.residuals])
    return f"{summarize(np.abs(np.exp(-ratios) - 1)):.1%}" if len(ratios) else "-"


def _calibrated_interval(calibration: FrameworkCalibration) -> str:
    if not calibration.residuals:
        return "unknown: one model, one number of devices"
    return f"±{np.exp(calibration.half_width()) - 1:.1%}"


def instants_text(instants: Mapping[str, MemoryParts]) -> str:
    """Returns memory in use as text, with a row per part and a column per instant."""
    names = [field.name for field in dataclasses.fields(MemoryParts)]
    rows = [["", *(instant.replace("_", " ") for instant in instants)]]
    rows += [
        [name.replace("_", " "), *(_format(getattr(held, name)) for held in instants.values())]
        for name in [*names, "total"]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def _format(num_bytes: int) -> str:
    return format_binary_bytes(num_bytes) if num_bytes else "-"
