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


def outcome_table(run: TrainingRun) -> Table:
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
    return Table(
        headers=("", "measured", "predicted"),
        rows=tuple(
            (label, with_interval(metrics[name], write), predicted.get(name, ""))
            for name, (label, write) in written.items()
            if name in metrics
        ),
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
    return Table(
        headers=("phase", "time", "share"),
        rows=tuple(
            (names[field], format_duration(seconds), f"{seconds / times.total_s:.1%}")
            for field, seconds in dataclasses.asdict(times).items()
        ),
        caption="Time by phase, without the steps that were lost when the run was killed",
        notes=(
            "Exposed communication is extrapolated from the steps that were sampled, one in "
            "logging.every_steps.",
        ),
    )


def evaluations_table(run: TrainingRun) -> Table:
    """Returns the newest evaluations."""
    return Table(
        headers=("step", "held-out loss", "bits per byte", "time"),
        rows=tuple(
            (f"{row.step:,}", f"{row.loss:.4f}", f"{row.bits_per_byte:.4f}", _seconds(row.time_s))
            for row in run.evaluations[-_MOST_ROWS:]
        ),
        caption=_caption("Evaluations", len(run.evaluations)),
    )


def events_table(run: TrainingRun) -> Table:
    """Returns the newest events."""
    return Table(
        headers=("step", "event", "message", "training stood still"),
        rows=tuple(
            (f"{row.step:,}", row.name, row.message, _seconds(row.time_s))
            for row in run.events[-_MOST_ROWS:]
        ),
        caption=_caption("Events", len(run.events)),
    )


def _seconds(time_s: float | None) -> str:
    return NOT_APPLICABLE if time_s is None else format_seconds(time_s)


def _caption(what: str, number: int) -> str:
    return what if number <= _MOST_ROWS else f"{what}: the last {_MOST_ROWS} of {number:,}"


def checkpoints_table(found: Sequence[CheckpointSummary], place: str) -> Table:
    """Returns a row per checkpoint: size, files, tensors, ranks that saved it, completeness."""
    return Table(
        headers=("step", "size", "files", "tensors", "ranks", "state"),
        rows=tuple(
            (
                f"{summary.step:,}",
                format_binary_bytes(summary.num_bytes),
                f"{summary.num_files:,}",
                f"{summary.num_tensors:,}",
                f"{summary.world_size:,}",
                summary.problem or "complete",
            )
            for summary in found
        ),
        caption=f"{place}: {len(found):,} checkpoints",
    )


def splits_table(manifest: DatasetManifest, place: str) -> Table:
    """Returns a row per split: shards, documents, tokens, size."""
    vocabulary = f"vocabulary of {manifest.vocab_size:,} as {manifest.dtype}"
    return Table(
        headers=("split", "shards", "documents", "tokens", "size"),
        rows=tuple(
            (
                name,
                f"{manifest.num_shards(name):,}",
                f"{split.num_documents:,}",
                f"{split.num_tokens:,}",
                format_binary_bytes(split.num_tokens * manifest.token_bytes),
            )
            for name, split in manifest.splits.items()
        ),
        caption=(
            f"{place}: {len(manifest.sources):,} files, {vocabulary}, "
            f"{manifest.source_bytes_per_token:.2f} bytes per token, "
            f"{format_count(manifest.shard_tokens)} tokens per shard"
        ),
    )


def dropped_table(manifest: DatasetManifest) -> Table:
    """Returns a row per reason for dropping documents."""
    return Table(
        headers=("left out", "documents", "size", "for example"),
        rows=tuple(
            (
                reason,
                f"{dropped.num_documents:,}",
                format_binary_bytes(dropped.num_bytes),
                dropped.examples[0] if dropped.examples else "",
            )
            for reason, dropped in manifest.dropped.items()
        ),
        caption="Documents that were left out",
    )
