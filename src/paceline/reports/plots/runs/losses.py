"""Plots of the losses, learning rate and gradient norm of a run."""

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from paceline.reports.evidence.training_run import TrainingRun
from paceline.reports.plots.runs.lines import (
    MEASURED,
    draw_held_out,
    mark_resumptions,
    run_figure,
    smoothed,
    thinned,
)
from paceline.reports.plots.style import GRAY, add_grid, blank_figure


def plot_losses(run: TrainingRun) -> Figure:
    """Draws the training loss, raw and smoothed, the held-out loss and the predicted final loss."""
    figure, axes = run_figure("Loss", run)
    steps = [row.step for row in run.steps]
    losses = [row.loss for row in run.steps]
    axes.plot(*thinned(steps, losses), color=MEASURED, alpha=0.3, linewidth=0.8)
    axes.plot(*smoothed(steps, losses), color=MEASURED, label="training, smoothed")
    if run.evaluations:
        draw_held_out(axes, run, "held-out")
    if (final := run.expected.final_loss) is not None and final.low and final.high:
        axes.errorbar(
            run.expected.num_steps,
            final.value,
            yerr=[[final.value - final.low], [final.high - final.value]],
            color=GRAY,
            fmt="s",
            capsize=6,
            label=f"predicted at the end: {final.value:.3f}",
        )
    mark_resumptions(axes, run)
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.set_xlabel("step")
    axes.legend()
    return figure


def plot_schedule(run: TrainingRun) -> Figure:
    """Draws the learning rate and, below it, the gradient norm."""
    figure = blank_figure("Learning rate and gradients", (8.0, 5.0))
    above, below = figure.subplots(2, sharex=True)
    steps = [row.step for row in run.steps]
    above.plot(*thinned(steps, [row.learning_rate for row in run.steps]), color=MEASURED)
    above.set_ylabel("learning rate")
    above.set_ylim(bottom=0)
    norms = [row.gradient_norm for row in run.steps]
    below.plot(*thinned(steps, norms), color=MEASURED, alpha=0.3, linewidth=0.8)
    below.plot(*smoothed(steps, norms), color=MEASURED, label="smoothed")
    below.set_ylabel("norm of the gradients")
    below.set_yscale("log")
    below.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    below.yaxis.set_major_formatter("{x:g}")
    below.yaxis.set_minor_formatter(NullFormatter())
    below.set_xlabel("step")
    for axes in (above, below):
        add_grid(axes, "y")
        mark_resumptions(axes, run, has_label=axes is below)
    below.legend()
    return figure
