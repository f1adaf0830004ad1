"""Tables of plans: layouts, budgets and advice, framework calibrations, predicted memory."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.accounting.memory.step import MemoryParts
from paceline.core.plan import SHARDINGS, Estimate, ParallelLayout
from paceline.core.units import (
    GB,
    format_binary_bytes,
    format_count,
    format_digits,
    format_duration,
    format_suffixed,
    to_gibibytes,
)
from paceline.planner.calibrations.calibration import FrameworkCalibration
from paceline.planner.goodput.scenario import DAY_S
from paceline.planner.search.advice import Change, Comparison, not_told_apart
from paceline.planner.search.budget import Budget, BudgetPoint, RunEstimate
from paceline.planner.search.measure_next import MeasuredNext
from paceline.planner.search.search import BOUNDS, Candidate, SearchResult
from paceline.records.schema import interval_ends
from paceline.reports.tables.table import NOT_APPLICABLE, Table

_LITTLE_MEMORY = 0.05
"""Share of free memory below which a layout may fail because of fragmentation."""


def search_table(
    result: SearchResult,
    model: str,
    runs: Sequence[RunEstimate] | None = None,
    notes: Sequence[str] = (),
) -> Table:
    """Returns a row for the best layout of every mesh, the fastest first.

    A row fits 80 columns. Axes that no layout uses have no column.
    """
    spec, estimates = result.spec, runs or ()
    alike = not_told_apart(result.choices)
    axes = {
        name: column
        for name, column in _AXES.items()
        if name in ("dp", "mb") or any(column(each) != _UNUSED for each in result.choices)
    }
    figures: dict[str, Callable[[tuple[int, Candidate]], object]] = {
        "step": lambda each: _seconds(each[1].step_time_s.value),
        "tokens/s /device": lambda each: _per_device(each[1]),
    }
    if estimates:
        figures["days (90%)"] = lambda each: _with_ends(
            estimates[each[0]].days, each[1].step_time_s
        )
    else:
        figures["90% interval"] = lambda each: " to ".join(
            map(_seconds, interval_ends(each[1].step_time_s))
        )
    figures |= {
        "MFU": lambda each: NOT_APPLICABLE if each[1].mfu is None else f"{each[1].mfu:.1%}",
        "free": lambda each: f"{each[1].headroom:.0%}",
    }
    return Table.of(
        enumerate(result.choices),
        {
            "": lambda each: f"{each[0] + 1}{'≈' if each[0] < alike and alike > 1 else ''}",
            **{name: _of_choice(column) for name, column in axes.items()},
            **figures,
        },
        caption=(
            f"{model}, {spec.global_batch:,} sequences of {spec.context_length:,} tokens in a "
            f"step.\n{result.performance.source}. "
            f"{result.num_candidates:,} layouts of {spec.num_devices:,} devices, "
            f"{result.num_fitting:,} fit; the best of each mesh, in {result.elapsed_s:.1f} s"
            f"{_network_text(result)}"
        ),
        notes=(
            *_alike_note(alike, result.choices),
            _LEGEND,
            _best_note(result.best),
            *_memory_note(result.choices),
            *_idle_note(result),
            *notes,
            *_outside_note(result.best),
        ),
    )


_UNUSED = "1"
_RECOMPUTED = {"none": _UNUSED, "selective": "select", "full": "full"}
_AXES: dict[str, Callable[[Candidate], str]] = {
    "dp": lambda each: _data_text(each.layout),
    "tp": lambda each: _tensor_text(each.layout),
    "cp": lambda each: str(each.layout.context),
    "ep": lambda each: str(each.layout.expert),
    "pp": lambda each: _pipeline_text(each.layout),
    "mb": lambda each: str(each.batch.num_sequences),
    "recompute": lambda each: _RECOMPUTED[each.layout.activation_checkpointing],
}


def _of_choice(column: Callable[[Candidate], str]) -> Callable[[tuple[int, Candidate]], str]:
    return lambda each: column(each[1])


def _data_text(layout: ParallelLayout) -> str:
    """Returns the data-parallel ranks and the ZeRO stage, such as 16 z1 or 8x2 z3."""
    stage = SHARDINGS.index(layout.sharding)
    if not stage:
        return str(layout.data_parallel)
    replicas = f"x{layout.replicate}" if layout.replicate > 1 else ""
    return f"{layout.shard}{replicas} z{stage}"


def _tensor_text(layout: ParallelLayout) -> str:
    return f"{layout.tensor}{'s' if layout.sequence_parallel and layout.tensor > 1 else ''}"


def _pipeline_text(layout: ParallelLayout) -> str:
    parts = f"x{layout.pipeline_interleave}" if layout.pipeline_interleave > 1 else ""
    return f"{layout.pipeline}{parts}"


def _per_device(choice: Candidate) -> str:
    return f"{choice.tokens_per_s / choice.devices:,.0f}"


def _with_ends(value: float, time: Estimate) -> str:
    """Returns a number that is proportional to a step time, with its interval."""
    low, high = (value * end / time.value for end in interval_ends(time))
    digits = ",.0f" if low >= 10 else ".2g"
    return f"{format_digits(value)} ({low:{digits}}-{high:{digits}})"


def _network_text(result: SearchResult) -> str:
    if result.spec.num_devices <= result.spec.devices_per_host:
        return ""
    gigabits = 8 * result.performance.network_bytes_per_s / GB
    return f". Network: {gigabits:,.0f} Gbit/s per device between hosts (--network)"


def _best_note(best: Candidate) -> str:
    return (
        f"1: {best.name}; {_bound(best)} of the step, pipeline bubble {best.bubble_share:.1%}, "
        f"exposed communication {best.exposed_share:.1%}."
    )


_LEGEND = (
    "dp: shards x replicas, z: ZeRO stage; tp: s with sequence parallelism; pp: stages x parts; "
    "mb: sequences of a micro-batch."
)


def _memory_note(choices: Sequence[Candidate]) -> tuple[str, ...]:
    if choices[0].headroom >= _LITTLE_MEMORY:
        return ()
    free = f"1 leaves {max(choices[0].headroom, 0):.1%} of the memory free, which fragmentation"
    roomy = next(
        (place for place, each in enumerate(choices) if each.headroom >= _LITTLE_MEMORY), None
    )
    if roomy is None:
        return (f"{free} may exceed; none of these leaves {_LITTLE_MEMORY:.0%}.",)
    return (f"{free} may exceed: {roomy + 1} is the first that leaves {_LITTLE_MEMORY:.0%}.",)


def _count(number: float | None) -> str:
    return "" if number is None else format_count(round(number))


def _bound(choice: Candidate) -> str:
    return f"{choice.bound} {choice.share(choice.bound):.0%}"


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
    interruptions = "interruption" if round(run.interruptions) == 1 else "interruptions"
    lines = [
        f"{format_suffixed(run.tokens)} tokens in {run.steps:,} steps: {_days(run.days)} "
        f"({_days(run.days_without_failures)} without failures, goodput {run.goodput:.1%}), "
        f"{_count(run.device_hours)} device-hours{spares}.",
        f"About {run.interruptions:,.0f} {interruptions}; save every "
        f"{format_duration(run.checkpoint_interval_s)}.",
    ]
    if run.cost is not None:
        lines.append(f"Cost: {_count(run.cost)}.")
    return tuple(lines)


def _seconds(seconds: float) -> str:
    return f"{format_digits(seconds)} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _days(days: float) -> str:
    """Returns days to three digits; of a run of less than a day, its hours and minutes."""
    return f"{format_digits(days)} days" if days >= 1 else format_duration(days * DAY_S)


def budget_table(found: Budget, model: str, device: str, notes: Sequence[str] = ()) -> Table:
    """Returns a row per number of devices; the smallest and the cheapest in time are marked."""
    columns: dict[str, Callable[[BudgetPoint], object]] = {
        "devices": lambda point: f"{point.devices:,}",
        "": lambda point: _marks(found, point),
        "days (90%)": lambda point: _with_ends(point.run.days, point.choice.step_time_s),
        "goodput": lambda point: f"{point.run.goodput:.1%}",
        "device-hours": lambda point: _count(point.run.device_hours),
    }
    if found.points[0].run.cost is not None:
        columns["cost"] = lambda point: _count(point.run.cost)
    columns |= {
        "stops": lambda point: f"{point.run.interruptions:,.0f}",
        "save every": lambda point: format_duration(point.run.checkpoint_interval_s),
        "spare hosts": lambda point: point.run.spare_hosts,
        "MFU": lambda point: "" if point.choice.mfu is None else f"{point.choice.mfu:.1%}",
        "layout": lambda point: point.choice.name,
    }
    return Table.of(
        found.points,
        columns,
        caption=(
            f"{format_suffixed(found.tokens)} tokens by day {found.deadline_days:g} on {device}: "
            f"{model}"
        ),
        notes=(
            f"smallest: {found.smallest.devices:,} devices, {_days(found.smallest.run.days)}; "
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


def next_runs_table(
    model: str, devices: int, half_width: float, found: Sequence[MeasuredNext]
) -> Table:
    """Returns a row per run to measure, the most useful first."""
    return Table.of(
        enumerate(found, start=1),
        {
            "": lambda each: each[0],
            "devices": lambda each: f"{each[1].devices:,}",
            "sequences per step": lambda each: f"{each[1].global_batch:,}",
            "layout": lambda each: each[1].choice.name,
            "then": lambda each: f"±{each[1].half_width:.0%}",
        },
        caption=(
            f"Measure next, for {model} on {devices:,} devices: its constants are known to "
            f"±{half_width:.0%}, and after each of these runs to what the last column says"
        ),
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
    if not calibration.residuals and calibration.half_width_elsewhere is None:
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
