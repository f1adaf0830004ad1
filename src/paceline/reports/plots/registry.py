"""All plots by name, and selection of those that a set of records supports."""

from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.figure import Figure

from paceline.core.errors import UsageError
from paceline.records import Record
from paceline.reports.plots.attention import MEMORY, TIME, plot_attention
from paceline.reports.plots.memory import plot_memory_timeline, plot_optimizer_memory
from paceline.reports.plots.reliability import plot_goodput
from paceline.reports.plots.step import plot_step_time, plot_warmup
from paceline.reports.plots.strategies import plot_bucket_size, plot_communication, plot_strategies
from paceline.reports.plots.timelines import plot_pipelines, plot_timelines

# Each plot with the kind of record that it draws and the field that must vary, if any.
PLOTS: dict[str, tuple[str, str | None, Callable[[Sequence[Record]], Figure]]] = {
    "step-time": ("step", None, partial(plot_step_time, "phase")),
    "warmup": ("step", "warmup", plot_warmup),
    "precision": ("step", "precision", partial(plot_step_time, "precision")),
    "attention-time": ("attention", "context", partial(plot_attention, TIME)),
    "attention-memory": ("attention", "context", partial(plot_attention, MEMORY)),
    "communication": ("comm", "size_bytes", plot_communication),
    "strategies": ("ddp", None, plot_strategies),
    "bucket-size": ("ddp", "bucket_size_mb", plot_bucket_size),
    "optimizer-memory": ("optimizer", None, plot_optimizer_memory),
    "memory-timeline": ("memory_timeline", None, plot_memory_timeline),
    "goodput": ("goodput", "devices", plot_goodput),
    "timelines": ("timeline", None, plot_timelines),
    "pipelines": ("pipeline", None, plot_pipelines),
}


def drawable_plots(records: Sequence[Record]) -> list[str]:
    """Returns the names of plots that have records and, if a field must vary, two values of it."""
    names = []
    for name, (kind, field, _draw) in PLOTS.items():
        chosen = _measured(records, kind)
        if chosen and (
            field is None or len({record.case[field] for record in chosen} - {None}) > 1
        ):
            names.append(name)
    return names


def draw(name: str, records: Sequence[Record]) -> Figure:
    """Draws one of `PLOTS` from the records of its kind and their predictions."""
    kind, _field, plot = PLOTS[name]
    if not _measured(records, kind):
        raise UsageError(f"nothing to draw for {name!r}: the store has no {kind!r} measurements")
    return plot([record for record in records if record.measured_kind.name == kind])


def _measured(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.kind == kind and record.metrics]
