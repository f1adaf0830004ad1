"""The report of a loop: plots first, then the decisions of each stage and their reasons."""

import dataclasses
import pathlib
from collections.abc import Iterator

import msgspec

from paceline.core.errors import UsageError
from paceline.core.units import format_binary_bytes, format_duration, format_seconds
from paceline.loop.choose import fit_sweep
from paceline.loop.directory import PAGE, ChosenLayout, ChosenModel, LoopDirectory, Outcome
from paceline.loop.sweep import sweep_table
from paceline.predict.history import HistoryEntry, accuracy_by_quantity, read_history
from paceline.reports.document import Block, Chapter, Page, Picture, picture_of, render_page
from paceline.reports.plots.scaling_laws import plot_errors, plot_profiles, plot_target
from paceline.reports.plots.training_run import plot_losses, plot_step_times
from paceline.reports.tables.predictions import coverage_table, outcome_table
from paceline.reports.tables.table import Table
from paceline.reports.training_run import read_run
from paceline.scaling.design import learn_from
from paceline.scaling.fits.all_methods import ScalingFit


def write_loop_page(directory: LoopDirectory, history: pathlib.Path) -> None:
    """Writes the report of a finished loop as one HTML file."""
    directory.write(PAGE, render_page(loop_page(directory, history)).encode())


def loop_page(directory: LoopDirectory, history: pathlib.Path) -> Page:
    """Builds the report of a finished loop."""
    model, layout, outcome = directory.model(), directory.layout(), directory.outcome()
    if model is None or layout is None or outcome is None:
        raise UsageError(f"{directory.path}: the loop has not ended; the same command resumes it")
    found = fit_sweep(directory.sweep)
    return Page(
        title=f"From {directory.spec().budget:.3g} FLOPs to a model",
        summary=tuple(_summary(model, layout, outcome)),
        chapters=(
            _prediction(directory, found, model, outcome),
            _training(directory, model, layout),
            _sweep(directory, found, model),
            Chapter(title="The layout", blocks=(Block(tables=(layout_table(layout),)),)),
            _exploration(model, outcome),
            _history(history),
        ),
    )


def _summary(model: ChosenModel, layout: ChosenLayout, outcome: Outcome) -> Iterator[str]:
    run = model.run
    yield (
        f"{run.parameters:,} parameters trained on {run.tokens:,} tokens with {run.flops:.3g} "
        f"FLOPs, {model.extrapolation:.1f} times the largest run of the sweep, on "
        f"{layout.chosen.ranks} ranks."
    )
    predicted = [each for each in outcome.entries if each.is_inside is not None]
    inside = sum(bool(each.is_inside) for each in predicted)
    loss = _entry(outcome, "heldout_loss")
    text = ""
    if loss is not None and loss.error is not None:
        text = f"Held-out loss {loss.measured:.4f}, predicted within {abs(loss.error):.1%}. "
    yield f"{text}{inside} of {len(predicted)} measurements lie inside their 90% interval."


def _entry(outcome: Outcome, quantity: str) -> HistoryEntry | None:
    return next((each for each in outcome.entries if each.quantity == quantity), None)


def _prediction(
    directory: LoopDirectory, found: ScalingFit, model: ChosenModel, outcome: Outcome
) -> Chapter:
    loss = _entry(outcome, "heldout_loss")
    measured = None if loss is None else loss.measured
    posterior, budget = learn_from(found.runs), directory.spec().budget
    target = plot_target(found, posterior, budget, model.loss, measured)
    errors = picture_of(
        plot_errors(outcome.entries), "errors", "Error and interval of each prediction"
    )
    caption = "The final run: predicted before it began, and measured"
    return Chapter(
        title="Predicted and measured",
        blocks=(
            _block(
                picture_of(
                    target, "target", "Losses of the sweep, the fitted law, and the final run"
                )
            ),
            _block(errors, outcome_table(outcome.entries, caption)),
        ),
    )


def _training(directory: LoopDirectory, model: ChosenModel, layout: ChosenLayout) -> Chapter:
    run = read_run(directory.run)
    expected = msgspec.structs.replace(
        run.expected, final_loss=model.loss, step_time_s=layout.step_time_s.value
    )
    run = dataclasses.replace(run, name="final run", expected=expected)
    losses = picture_of(plot_losses(run), "loss", "Loss of the final run and its prediction")
    times = picture_of(plot_step_times(run), "steps", "Step times and their prediction")
    return Chapter(title="The final run", blocks=(_block(losses), _block(times)))


def _sweep(directory: LoopDirectory, found: ScalingFit, model: ChosenModel) -> Chapter:
    profiles = picture_of(plot_profiles(found), "profiles", "Loss by model size at each budget")
    return Chapter(
        title="The sweep",
        blocks=(
            _block(profiles),
            Block(
                tables=(sweep_table(directory.sweep).without_directories(),),
                findings=model.findings,
            ),
        ),
    )


def _exploration(model: ChosenModel, outcome: Outcome) -> Chapter:
    spent = outcome.sweep_flops / outcome.run_flops
    rows = [
        (
            "the sweep",
            f"{outcome.sweep_flops:.3g} FLOPs, {spent:.0%} of the final run's; "
            f"{format_duration(outcome.sweep_time_s)} of runs",
        )
    ]
    rule = model.rule_of_thumb
    saved = (
        f"N {rule.parameters:.3g} instead of {model.parameters.value:.3g}: loss {rule.loss:.4f} on "
        f"the same loss surface, {rule.wasted:.1%} of the FLOPs wasted"
    )
    rows.append(("20 tokens per parameter instead", saved))
    table = Table(
        headers=("", ""), rows=tuple(rows), caption="Cost of the sweep, and what it saved"
    )
    return Chapter(title="Cost of the sweep", blocks=(Block(tables=(table,)),))


def _history(path: pathlib.Path) -> Chapter:
    entries = read_history(path)
    caption = "All predictions on this machine, and how often measurements were inside the interval"
    table = coverage_table(accuracy_by_quantity(entries), caption)
    return Chapter(title="All predictions so far", blocks=(Block(tables=(table,)),))


def _block(picture: Picture, *tables: Table) -> Block:
    return Block(pictures=(picture,), tables=tables)


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
