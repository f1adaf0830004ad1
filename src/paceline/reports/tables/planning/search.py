"""Tables of `paceline plan search` and `plan budget`: best layouts, comparisons, advice."""

from collections.abc import Sequence

from paceline.core.units import format_count, format_duration, to_gibibytes
from paceline.planner.search.advice import Change, Comparison, not_told_apart
from paceline.planner.search.budget import RunEstimate
from paceline.planner.search.choice import BOUNDS, Choice
from paceline.planner.search.search import SearchResult
from paceline.reports.tables.table import Table
from paceline.reports.tables.terminal import NOT_APPLICABLE


def search_table(
    result: SearchResult, runs: Sequence[RunEstimate] | None = None, notes: Sequence[str] = ()
) -> Table:
    """Returns a row for the best layout of every mesh, the fastest first."""
    question = result.question
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
            f"{result.num_candidates:,} layouts of {question.num_devices:,} devices, "
            f"{result.num_fitting:,} fit; the best of each mesh, in {result.elapsed_s:.1f} s"
        ),
        notes=(
            *_alike_note(alike, result.choices),
            *_idle_note(result),
            *notes,
            *_outside_note(result.best),
        ),
    )


def _row(place: int, choice: Choice, alike: int, run: RunEstimate | None) -> tuple[str, ...]:
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


def _bound(choice: Choice) -> str:
    share = choice.parts[choice.bound] / choice.step_time_s.value
    return f"{choice.bound} {share:.0%}"


def _alike_note(alike: int, found: Sequence[Choice]) -> tuple[str, ...]:
    if alike < 2:
        return ()
    everything = "all of these" if alike == len(found) else f"the first {alike}"
    return (f"≈ {everything} cannot be told apart: measure 20 steps of each.",)


def _outside_note(best: Choice) -> tuple[str, ...]:
    if not best.outside:
        return ()
    reached = "; ".join(
        each.removesuffix(", the range of the measured runs") for each in best.outside
    )
    return (f"The interval is wider because no measured run is similar: {reached}.",)


def _idle_note(result: SearchResult) -> tuple[str, ...]:
    idle = result.question.num_devices - result.best.devices
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
