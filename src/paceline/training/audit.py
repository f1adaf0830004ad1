"""Audits whether a run trained on every sample of its stream exactly once, from its metrics."""

import pathlib
from collections.abc import Iterator

from paceline.data.audit import AuditFinding, AuditRow, audit_row, check_audit
from paceline.data.loader.batches import BatchReader
from paceline.training.config import RunConfig
from paceline.training.metrics import (
    FIRST_SAMPLE,
    NUM_SAMPLES,
    SKIPPED,
    EventRow,
    MetricsFile,
    StepRow,
)
from paceline.training.run_files import CONFIG, METRICS
from paceline.training.toml_config import read_config


def audit_run(directory: pathlib.Path) -> tuple[int, list[AuditFinding]]:
    """Re-reads a run's training data; returns the number of steps and the audit findings.

    Args:
        directory: Directory of the run; its datasets must be where its config says.
    """
    config = read_config(directory / CONFIG)
    rows = list(_rows(directory, config))
    reader = BatchReader(config.loader())
    try:
        left_out = list(_left_out(directory, reader))
        return len(rows), check_audit([*rows, *left_out], reader.digest)
    finally:
        reader.close()


def _rows(directory: pathlib.Path, config: RunConfig) -> Iterator[AuditRow]:
    for row in MetricsFile(directory / METRICS).read():
        if isinstance(row, StepRow):
            yield AuditRow(
                step=row.step,
                first_sample=row.first_sample,
                num_samples=_batch_size(row, config),
                digest=row.data_digest,
            )


def _batch_size(row: StepRow, config: RunConfig) -> int:
    if config.parallel.elastic_batch == "kept":
        return config.training.batch_size
    # Replicas may be missing in some steps: derive the batch size from the cumulative tokens.
    return row.tokens // config.data.context_length - row.first_sample


def _left_out(directory: pathlib.Path, reader: BatchReader) -> Iterator[AuditRow]:
    """Yields the samples that the run skipped on purpose, which do not count as missing."""
    for row in MetricsFile(directory / METRICS).read():
        if isinstance(row, EventRow) and row.name == SKIPPED and row.details is not None:
            first, number = int(row.details[FIRST_SAMPLE]), int(row.details[NUM_SAMPLES])
            yield audit_row(row.step, first, number, reader.digest(first, number))
