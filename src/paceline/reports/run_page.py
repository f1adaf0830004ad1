"""Builds the HTML page of a training run: loss, speed, phases, memory, events and config."""

import pathlib

from paceline.core.units import format_decimal, format_seconds
from paceline.records.schema import with_interval
from paceline.reports.document import Block, Chapter, Page, Picture, picture_of, render_page
from paceline.reports.fields import without_directories
from paceline.reports.plots.training_run import (
    plot_losses,
    plot_memory,
    plot_phases,
    plot_schedule,
    plot_step_times,
    plot_throughput,
)
from paceline.reports.record_sets import describe_environment
from paceline.reports.tables.training_run import (
    evaluations_table,
    events_table,
    metrics_table,
    phases_table,
)
from paceline.reports.training_run import TrainingRun, read_run
from paceline.training.metrics import FINISHED, run_metrics


def write_run_page(directory: pathlib.Path, out: pathlib.Path) -> None:
    """Writes the page of the run in `directory` as a single HTML file."""
    page = render_page(run_page(read_run(directory)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")


def run_page(run: TrainingRun) -> Page:
    """Returns the page of a run; without completed steps it has only events and config."""
    seen = _chapters(run) if run.steps else ()
    happened = events_table(run).without_directories()
    events = Chapter(title="Events", blocks=(Block(tables=(happened,)),))
    config = Chapter(title="Config", blocks=(Block(listing=without_directories(run.config)),))
    return Page(
        title=f"Training run: {run.name}", summary=_summary(run), chapters=(*seen, events, config)
    )


def _summary(run: TrainingRun) -> tuple[str, ...]:
    machine = f"On {describe_environment(run.environment)}."
    if not run.steps:
        return "No step is done yet.", machine
    last, metrics = run.steps[-1].step, run_metrics(run.rows, run.expected)
    is_finished = any(row.name == FINISHED and row.step == last for row in run.events)
    state = "Finished" if is_finished else "Not finished"
    times = len(run.resumptions)
    resumed = f", resumed {times} time{'' if times == 1 else 's'}" if times else ""
    losses = f"Loss {metrics['loss'].value:.4f}"
    if "heldout_loss" in metrics:
        losses += (
            f", on held-out text {metrics['heldout_loss'].value:.4f} "
            f"({metrics['bits_per_byte'].value:.4f} bits per byte)"
        )
    speed = format_decimal(metrics["tokens_per_s"].value, "tokens/s")
    step = format_seconds(metrics["step_time_s"].value)
    known = run.expected.step_time
    predicted = "" if known is None else f", predicted {with_interval(known, format_seconds)}"
    return (
        f"{state}: {last:,} of {run.expected.num_steps:,} steps{resumed}. {losses}. {speed}, "
        f"{step} per step{predicted}.",
        machine,
    )


def _chapters(run: TrainingRun) -> tuple[Chapter, ...]:
    losses = picture_of(
        plot_losses(run), "loss", "Training loss by step, and the loss on held-out text"
    )
    schedule = picture_of(
        plot_schedule(run), "schedule", "Learning rate and norm of the gradients by step"
    )
    throughput = picture_of(plot_throughput(run), "throughput", "Tokens per second by step")
    histogram = "Histogram of step times"
    if run.expected.step_time_s is not None:
        histogram += ", and what was predicted"
    step_times = picture_of(plot_step_times(run), "step-times", histogram)
    phases = picture_of(plot_phases(run), "phases", "Shares of the run's time by phase")
    evaluations = (Block(tables=(evaluations_table(run),)),) if run.evaluations else ()
    sample = run.evaluations[-1].sample if run.evaluations else None
    said = (Block(heading="How the model continues the prompt", listing=sample),) if sample else ()
    return (
        Chapter(title="Loss", blocks=(_picture(losses), _picture(schedule), *evaluations, *said)),
        Chapter(title="Speed", blocks=(_picture(throughput), _picture(step_times))),
        Chapter(
            title="Time by phase", blocks=(_picture(phases), Block(tables=(phases_table(run),)))
        ),
        *_memory(run),
        Chapter(title="Measured and predicted", blocks=(Block(tables=(metrics_table(run),)),)),
    )


def _memory(run: TrainingRun) -> tuple[Chapter, ...]:
    figure = plot_memory(run)
    if figure is None:
        return ()
    memory = picture_of(figure, "memory", "Memory of the first rank by step, and its limit")
    return (Chapter(title="Memory", blocks=(_picture(memory),)),)


def _picture(picture: Picture) -> Block:
    return Block(pictures=(picture,))
