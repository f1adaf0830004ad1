"""Tables of scaling laws: answers by method, the cost of a wrong model size, runs."""

from collections.abc import Sequence

from paceline.records import Record
from paceline.records.schema import with_interval
from paceline.reports.tables.table import Table
from paceline.scaling.decide import Decision
from paceline.scaling.fits.all_methods import ScalingFit
from paceline.scaling.fits.prediction import DEFAULT_LEVEL
from paceline.scaling.surface import compute_for


def methods_table(
    fit: ScalingFit, decisions: Sequence[Decision], level: float = DEFAULT_LEVEL
) -> Table:
    """Returns a row per budget and method with its answer."""
    exponents = {method.method: method.exponent for method in fit.methods}
    sweep = fit.sweep
    farthest = max(decision.extrapolation for decision in decisions)
    return Table.of(
        [(decision, answer) for decision in decisions for answer in decision.answers],
        {
            "FLOPs": lambda each: f"{each[0].compute:.3g}",
            "method": lambda each: each[1].method,
            "N ~ C^": lambda each: f"{exponents[each[1].method]:.4f}",
            "parameters": lambda each: with_interval(each[1].parameters, "{:.3g}".format),
            "tokens": lambda each: with_interval(each[1].tokens, "{:.3g}".format),
            "loss": lambda each: with_interval(each[1].loss, "{:.4f}".format),
            "tokens/N": lambda each: f"{each[1].tokens.value / each[1].parameters.value:.3g}",
        },
        caption=f"{len(sweep)} runs, {len(sweep.budgets)} budgets up to {sweep.compute.max():.3g} "
        f"FLOPs, extrapolated {farthest:.3g} times; {level:.0%} intervals",
        notes=(
            *(
                f"parametric N at {decision.compute:.3g} FLOPs by profile: "
                f"{with_interval(decision.profile, '{:.3g}'.format)}"
                for decision in decisions
                if decision.profile is not None
            ),
            fit.choice.reason,
            *(f"left out: {reason}" for _method, reason in fit.left_out),
        ),
    )


def waste_table(decision: Decision) -> Table:
    """Returns the share of one budget that models of other sizes would waste."""
    return Table.of(
        decision.waste,
        {
            "parameters": lambda waste: f"{waste.parameters:.3g}",
            "that is": lambda waste: waste.reason,
            "FLOPs wasted": lambda waste: f"{waste.wasted:.2%}",
            "loss": lambda waste: f"{waste.loss:.4f}",
        },
        caption=f"what being wrong costs at {decision.compute:.3g} FLOPs, by {decision.method}",
    )


def run_text(decision: Decision) -> str:
    """Returns a few lines that describe the model to train and its run."""
    run = decision.run
    shape = run.shape
    times = run.flops_per_token / float(compute_for(run.parameters, 1))
    return (
        f"train at {decision.compute:.3g} FLOPs: {shape.num_layers} layers, d_model "
        f"{shape.d_model}, d_ff {shape.d_ff}, {shape.num_heads} heads of {shape.head_width}, "
        f"vocabulary {shape.vocab_size:,}: {run.parameters:,} parameters\n"
        f"  {run.tokens:,} tokens in {run.num_steps:,} steps of {run.tokens_per_step:,}; exact "
        f"{run.flops:.4g} FLOPs, {times:.3f} times 6ND\n"
        f"  a learning rate to begin tuning at: {decision.learning_rate:.2g} (Step Law)"
    )


def runs_table(records: Sequence[Record]) -> Table:
    """Returns proposed or finished runs, with their cumulative cost."""
    details = [name for name in records[0].case if name not in ("compute_budget", "parameters")]
    has_losses = any("final_loss" in record.metrics for record in records)
    rows = []
    spent = 0.0
    for record in records:
        spent += record.metrics["cost"].value
        sizes = (record.metrics[name].value for name in ("parameters", "tokens"))
        others = (record.case[name] for name in details)
        numbers = (record.case["compute_budget"], *sizes, *others, spent)
        cells = [str(value) if isinstance(value, int) else f"{value:.3g}" for value in numbers]
        if has_losses:
            cells.append(f"{record.metrics['final_loss'].value:.4f}")
        rows.append(tuple(cells))
    names = (name.removeprefix("num_").replace("_", " ") for name in details)
    headers = ("FLOPs", "parameters", "tokens", *names, "cost so far")
    return Table(
        headers=(*headers, "loss") if has_losses else headers,
        rows=tuple(rows),
        caption=f"{len(rows)} runs",
    )
