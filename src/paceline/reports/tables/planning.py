"""Tables of plans: layouts, budgets and advice, framework calibrations, predicted memory."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from paceline.accounting.memory.step import MemoryParts
from paceline.core.units import format_binary_bytes, format_count, format_duration, to_gibibytes
from paceline.planner.calibrations.calibration import FrameworkCalibration
from paceline.planner.search.advice import Change, Comparison, not_told_apart
from paceline.planner.search.budget import Budget, BudgetPoint, RunEstimate
from paceline.planner.search.search import BOUNDS, Candidate, SearchResult
from paceline.reports.tables.table import NOT_APPLICABLE, Table


def search_table(
    result: SearchResult, runs: Sequence[RunEstimate] | None = None, notes: Sequence[str] = ()
) -> Table:
    """Returns a row for the best layout of every mesh, the fastest first."""
    spec = result.spec
    alike = not_told_apart(result.choices)
    return Table(
        headers=(
            *("", "layout", "step", "90% interval", "MFU", "memory", "free", "bound by"),
            *("bubble", "exposed"),
            *(() if runs is None else ("days", "goodput", "device-hours")),
            *(() if runs is None or runs[0].cost is None else ("cost",)),
        ),
        rows=tuple(
            _row(place, choice, alike, None if runs is None else runs[place])
            for place, choice in enumerate(result.choices)
        ),
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


def _row(place: int, choice: Candidate, alike: int, run: RunEstimate | None) -> tuple[str, ...]:
    time = choice.step_time_s
    low = time.value if time.low is None else time.low
    high = time.value if time.high is None else time.high
    run_cells: tuple[str, ...] = ()
    if run is not None:
        run_cells = (f"{run.days:.3g}", f"{run.goodput:.1%}", format_count(round(run.device_hours)))
        if run.cost is not None:
            run_cells += (format_count(round(run.cost)),)
    return (
        f"{place + 1}{'≈' if place < alike and alike > 1 else ''}",
        choice.name,
        _seconds(time.value),
        f"{_seconds(low)} to {_seconds(high)}",
        NOT_APPLICABLE if choice.mfu is None else f"{choice.mfu:.1%}",
        f"{to_gibibytes(choice.peak_bytes):.1f} GiB",
        f"{choice.headroom:.0%}",
        _bound(choice),
        f"{choice.bubble_share:.1%}",
        f"{choice.exposed_share:.1%}",
        *run_cells,
    )


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
    return Table(
        headers=("with", "tokens/s", "device-hours", "best layout then"),
        rows=tuple(
            (
                change.what,
                f"{change.speedup:.2f}x",
                f"{change.device_hours - 1:+.1%}",
                change.choice.name,
            )
            for change in changes
        ),
        caption="What would help: the search again, with one thing changed",
    )


def run_lines(run: RunEstimate) -> tuple[str, ...]:
    """Returns sentences on the duration, device-hours, interruptions and cost of a run."""
    spares = f" and {run.spare_hosts} spare hosts" if run.spare_hosts else ""
    lines = [
        f"{run.tokens:.3g} tokens in {run.steps:,} steps: {run.days:.3g} days "
        f"({run.days_without_failures:.3g} without failures, goodput {run.goodput:.1%}), "
        f"{format_count(round(run.device_hours))} device-hours{spares}.",
        f"About {run.interruptions:.0f} interruptions; save every "
        f"{format_duration(run.checkpoint_interval_s)}.",
    ]
    if run.cost is not None:
        lines.append(f"Cost: {format_count(round(run.cost))}.")
    return tuple(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def budget_table(found: Budget, model: str, device: str, notes: Sequence[str] = ()) -> Table:
    """Returns a row per number of devices; the smallest and the cheapest in time are marked."""
    has_price = found.points[0].run.cost is not None
    return Table(
        headers=(
            *("devices", "", "days", "90% interval", "goodput", "device-hours"),
            *(("cost",) if has_price else ()),
            *("stops", "save every", "spare hosts", "MFU", "layout"),
        ),
        rows=tuple(_budget_row(found, point) for point in found.points),
        caption=(f"{found.tokens:.3g} tokens by day {found.deadline_days:g} on {device}: {model}"),
        notes=(
            f"smallest: {found.smallest.devices:,} devices, {found.smallest.run.days:.3g} days; "
            f"cheapest: {found.cheapest.devices:,} devices, "
            f"{format_count(round(found.cheapest.run.device_hours))} device-hours.",
            *notes,
        ),
    )


def _budget_row(found: Budget, point: BudgetPoint) -> tuple[str, ...]:
    run, time = point.run, point.choice.step_time_s
    marks = [
        name
        for name, is_it in (
            ("smallest", point is found.smallest),
            ("cheapest", point is found.cheapest),
            ("too late", not point.in_time),
        )
        if is_it
    ]
    low, high = (
        run.days if end is None else run.days * end / time.value for end in (time.low, time.high)
    )
    return (
        f"{point.devices:,}",
        ", ".join(marks),
        f"{run.days:.3g}",
        f"{low:.3g} to {high:.3g}",
        f"{run.goodput:.1%}",
        format_count(round(run.device_hours)),
        *(() if run.cost is None else (format_count(round(run.cost)),)),
        f"{run.interruptions:.0f}",
        format_duration(run.checkpoint_interval_s),
        f"{run.spare_hosts}",
        "" if point.choice.mfu is None else f"{point.choice.mfu:.1%}",
        point.choice.name,
    )


_NOT_HELD_OUT = "-"


def calibrations_table(calibrations: Sequence[FrameworkCalibration]) -> Table:
    """Returns a row per calibration."""
    return Table(
        headers=(
            *("calibration", "rows", "matmuls (of peak)", "attention (of peak)"),
            *("memory (of bandwidth)", "held-out error, mean", "largest", "90% interval"),
        ),
        rows=tuple(_calibration_row(each) for each in calibrations),
        caption="Shares of what the vendor states; errors of rows while their model was held out",
    )


def _calibration_row(calibration: FrameworkCalibration) -> tuple[str, ...]:
    constants = calibration.constants
    attention = constants.get("attention_share")
    ratios = np.array([each.log_ratio for each in calibration.residuals])
    if len(ratios):
        errors = np.abs(np.exp(-ratios) - 1)
        half = np.exp(calibration.half_width()) - 1
        figures = (f"{errors.mean():.1%}", f"{errors.max():.1%}", f"±{half:.1%}")
    else:
        figures = (_NOT_HELD_OUT, _NOT_HELD_OUT, "unknown: one model, one number of devices")
    return (
        calibration.name,
        f"{len(calibration.rows)}",
        f"{constants['matmul_share']:.0%}",
        "as matmuls" if attention is None else f"{attention:.0%}",
        f"{constants['memory_share']:.0%}",
        *figures,
    )


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
