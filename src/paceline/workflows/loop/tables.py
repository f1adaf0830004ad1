"""Tables of a loop: the layouts on this machine, and the plan for a cluster."""

from paceline.core.units import format_binary_bytes, format_seconds
from paceline.reports.tables.columns import with_interval
from paceline.reports.tables.table import Table
from paceline.workflows.loop.directory import ChosenLayout
from paceline.workflows.loop.on_paper import ClusterPlan
from paceline.workflows.sweep.design import NUM_LATER


def layout_table(layout: ChosenLayout) -> Table:
    """Builds a table with a row per layout, the chosen one first."""
    return Table(
        headers=("ranks", "strategy", "step in pilot run", "step by formulas", "tensors per rank"),
        rows=tuple(
            (
                str(each.ranks),
                each.strategy,
                "" if each.pilot is None else format_seconds(each.pilot.step_time_s),
                format_seconds(each.step_time_s),
                format_binary_bytes(each.memory_bytes),
            )
            for each in layout.candidates
        ),
        caption=f"Layouts on {layout.hardware}, calibrated with this model; the first is trained",
    )


def cluster_table(plan: ClusterPlan, in_time: bool | None) -> Table:
    """Builds a table with a row per stage: its decision, and the basis for it."""
    shape, run, best = plan.shape, plan.run, plan.found.best
    days = f"{run.days:.3g} days ({run.days_without_failures:.3g} without failures)"
    deadline = {None: "", True: "; in time", False: "; after the deadline"}[in_time]
    cost = "" if run.cost is None else f", cost {run.cost:,.0f}"
    spares = f", {run.spare_hosts} spare hosts" if run.spare_hosts else ""
    off_by_two = plan.wasted[2.0]
    rows = (
        (
            "sweep",
            f"{len(plan.sweep)} runs, then about {NUM_LATER} more: {plan.sweep_flops:.3g} FLOPs "
            f"({plan.exploration:.1%} of the budget), {plan.sweep_days:.3g} days",
            "the same MFU as the large run is assumed",
        ),
        (
            "choose",
            f"N {with_interval(plan.parameters, '{:.3g}'.format)}: {shape.num_layers} layers of "
            f"width {shape.d_model:,}, {plan.num_parameters / 1e9:.3g} billion parameters; "
            f"{plan.tokens:.3g} tokens; loss {with_interval(plan.loss, '{:.2f}'.format)}",
            "published scaling laws; the sweep narrows them. N off by a factor of 2 wastes "
            f"{off_by_two:.1%} of the budget",
        ),
        (
            "plan",
            f"{best.name}; step {with_interval(best.step_time_s, format_seconds)}, MFU "
            f"{best.mfu or 0:.1%}, {1 - best.headroom:.0%} of a device's memory",
            plan.found.costs.note,
        ),
        (
            "train",
            f"{run.steps:,} steps, {days}, goodput {run.goodput:.1%}, about "
            f"{run.interruptions:.0f} interruptions, {run.device_hours:,.0f} device-hours"
            f"{spares}{cost}{deadline}",
            "failures of a device as often as with Llama 3, unless --device-interval-h says "
            "otherwise",
        ),
        (
            "save",
            f"a checkpoint every {format_seconds(run.checkpoint_interval_s)}",
            "the interval that loses least to saving and to failures",
        ),
    )
    return Table(
        headers=("stage", "decision", "where it comes from"),
        rows=rows,
        caption=f"{plan.budget:.3g} FLOPs on {plan.found.question.num_devices:,} devices, on paper",
    )
