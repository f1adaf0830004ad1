"""The table of `paceline plan budget`: duration and cost by number of devices."""

from collections.abc import Sequence

from paceline.core.units import format_count, format_duration
from paceline.planner.search.budget import Budget, BudgetPoint
from paceline.reports.tables.table import Table


def budget_table(found: Budget, model: str, device: str, notes: Sequence[str] = ()) -> Table:
    """Returns a row per number of devices; the smallest and the cheapest in time are marked."""
    has_price = found.points[0].run.cost is not None
    return Table(
        headers=(
            *("devices", "", "days", "90% interval", "goodput", "device-hours"),
            *(("cost",) if has_price else ()),
            *("stops", "save every", "spare hosts", "MFU", "layout"),
        ),
        rows=tuple(_row(found, point) for point in found.points),
        caption=(f"{found.tokens:.3g} tokens by day {found.deadline_days:g} on {device}: {model}"),
        notes=(
            f"smallest: {found.smallest.devices:,} devices, {found.smallest.run.days:.3g} days; "
            f"cheapest: {found.cheapest.devices:,} devices, "
            f"{format_count(round(found.cheapest.run.device_hours))} device-hours.",
            *notes,
        ),
    )


def _row(found: Budget, point: BudgetPoint) -> tuple[str, ...]:
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
