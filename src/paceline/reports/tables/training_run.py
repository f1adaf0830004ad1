"""Tables of a training run, its checkpoints, and its dataset."""

import dataclasses
from collections.abc import Sequence

from paceline.checkpoint.catalog import CheckpointSummary
from paceline.core.units import format_binary_bytes, format_count, format_duration, format_seconds
from paceline.data.manifest import DatasetManifest
from paceline.records.schema import with_interval
from paceline.reports.tables.table import NOT_APPLICABLE, Table
from paceline.reports.training_run import TrainingRun
from paceline.training.metrics import phase_times, run_metrics

_MOST_ROWS = 40
"""Maximum number of evaluations and events; the newest are shown."""


def metrics_table(run: TrainingRun) -> Table:
    """Returns the measured metrics of the run, with their predictions if there are any."""
    metrics, expected = run_metrics(run.rows, run.expected), run.expected
    written = {
        "loss": ("loss, mean of the last steps", "{:.4f}".format),
        "heldout_loss": ("held-out loss", "{:.4f}".format),
        "bits_per_byte": ("held-out bits per byte", "{:.4f}".format),
        "tokens": ("tokens", "{:,.0f}".format),
        "tokens_per_s": ("tokens per second", "{:,.0f}".format),
        "step_time_s": ("step time, median", format_seconds),
        "exposed_communication_s": ("exposed communication per step", format_seconds),
        "model_flops_utilization": ("model FLOPs utilization", "{:.1%}".format),
        "memory_bytes": ("memory of the first rank", format_binary_bytes),
    }
    predicted = {}
    if (final := expected.final_loss) is not None:
        compared = "heldout_loss" if "heldout_loss" in metrics else "loss"
        predicted[compared] = f"{final.value:.4f} ({final.low:.4f} to {final.high:.4f}) at the end"
    if expected.process_memory is not None:
        predicted["memory_bytes"] = with_interval(expected.process_memory, format_binary_bytes)
    elif expected.memory_bytes is not None:
        predicted["memory_bytes"] = f"{format_binary_bytes(expected.memory_bytes)} of tensors"
    if (step := expected.step_time) is not None:
        predicted["step_time_s"] = with_interval(step, format_seconds)
        predicted["tokens_per_s"] = f"{expected.tokens_per_s(step.value):,.0f}"
    shown = [(name, *label_and_format) for name, label_and_format in written.items()]
    return Table.of(
        [each for each in shown if each[0] in metrics],
        {
            "": lambda each: each[1],
            "measured": lambda each: with_interval(metrics[each[0]], each[2]),
            "predicted": lambda each: predicted.get(each[0], ""),
        },
        caption="Measured and predicted",
    )


def phases_table(run: TrainingRun) -> Table:
    """Returns the time and share of each phase of the run."""
    times = phase_times(run.rows)
    names = {
        "compute_s": "compute: forward, backward, optimizer",
        "exposed_communication_s": "exposed communication",
        "data_wait_s": "waiting for data",
        "evaluation_s": "evaluation",
        "checkpoint_s": "checkpoint: training stopped for it",
    }
    return Table.of(
        dataclasses.asdict(times).items(),
        {
            "phase": lambda item: names[item[0]],
            "time": lambda item: format_duration(item[1]),
            "share": lambda item: f"{item[1] / times.total_s:.1%}",
        },
        caption="Time by phase, without the steps that were lost when the run was killed",
        notes=(
            "Exposed communication is extrapolated from the steps that were sampled, one in "
            "logging.every_steps.",
        ),
    )


def evaluations_table(run: TrainingRun) -> Table:
    """Returns the newest evaluations."""
    return Table.of(
        run.evaluations[-_MOST_ROWS:],
        {
            "step": lambda row: f"{row.step:,}",
            "held-out loss": lambda row: f"{row.loss:.4f}",
            "bits per byte": lambda row: f"{row.bits_per_byte:.4f}",
            "time": lambda row: _seconds(row.time_s),
        },
        caption=_caption("Evaluations", len(run.evaluations)),
    )


def events_table(run: TrainingRun) -> Table:
    """Returns the newest events."""
    return Table.of(
        run.events[-_MOST_ROWS:],
        {
            "step": lambda row: f"{row.step:,}",
            "event": lambda row: row.name,
            "message": lambda row: row.message,
            "training stood still": lambda row: _seconds(row.time_s),
        },
        caption=_caption("Events", len(run.events)),
    )


def _seconds(time_s: float | None) -> str:
    return NOT_APPLICABLE if time_s is None else format_seconds(time_s)


def _caption(what: str, number: int) -> str:
    return what if number <= _MOST_ROWS else f"{what}: the last {_MOST_ROWS} of {number:,}"


def checkpoints_table(found: Sequence[CheckpointSummary], path: str) -> Table:
    """Returns a row per checkpoint: size, files, tensors, ranks that saved it, completeness."""
    return Table.of(
        found,
        {
            "step": lambda summary: f"{summary.step:,}",
            "size": lambda summary: format_binary_bytes(summary.num_bytes),
            "files": lambda summary: f"{summary.num_files:,}",
            "tensors": lambda summary: f"{summary.num_tensors:,}",
            "ranks": lambda summary: f"{summary.world_size:,}",
            "state": lambda summary: summary.problem or "complete",
        },
        caption=f"{path}: {len(found):,} checkpoints",
    )


def splits_table(manifest: DatasetManifest, path: str) -> Table:
    """Returns a row per split: shards, documents, tokens, size."""
    vocabulary = f"vocabulary of {manifest.vocab_size:,} as {manifest.dtype}"
    splits = manifest.splits
    return Table.of(
        splits,
        {
            "split": lambda name: name,
            "shards": lambda name: f"{manifest.num_shards(name):,}",
            "documents": lambda name: f"{splits[name].num_documents:,}",
            "tokens": lambda name: f"{splits[name].num_tokens:,}",
            "size": lambda name: format_binary_bytes(
                splits[name].num_tokens * manifest.token_bytes
            ),
        },
        caption=(
            f"{path}: {len(manifest.sources):,} files, {vocabulary}, "
            f"{manifest.source_bytes_per_token:.2f} bytes per token, "
            f"{format_count(manifest.shard_tokens)} tokens per shard"
        ),
    )


def dropped_table(manifest: DatasetManifest) -> Table:
    """Returns a row per reason for dropping documents."""
    return Table.of(
        manifest.dropped.items(),
        {
            "left out": lambda item: item[0],
            "documents": lambda item: f"{item[1].num_documents:,}",
            "size": lambda item: format_binary_bytes(item[1].num_bytes),
            "for example": lambda item: item[1].examples[0] if item[1].examples else "",
        },
        caption="Documents that were left out",
    )
