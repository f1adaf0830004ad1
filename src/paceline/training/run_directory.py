"""The directory of a run: names of its files, and what those of a finished run say.

A finished run has a record. Its metrics show whether it trained on every sample of its stream
exactly once, and its predictions beside their measurements correct later predictions.
"""

import pathlib
from collections.abc import Sequence

import msgspec

from paceline.accounting.counts import count_parameters
from paceline.core.plan import Estimate
from paceline.data.audit import AuditFinding, AuditRow, audit_row, check_audit
from paceline.data.loader.batches import BatchReader
from paceline.predict.history import (
    HistoryEntry,
    Quantity,
    append_history,
    corrected,
    history_path,
    read_history,
)
from paceline.records import Record, RecordStore
from paceline.training.config import RunConfig
from paceline.training.forecast import Forecast
from paceline.training.metrics import (
    FIRST_SAMPLE,
    NUM_SAMPLES,
    SKIPPED,
    EventRow,
    MetricsFile,
    StepRow,
)
from paceline.training.toml_config import read_config

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
EXPECTATION = "expectation.json"
"""Predictions and limits, written before the first step."""
METRICS = "metrics.jsonl"
RECORD = "record.jsonl"
"""Record of the finished run."""
CHECKPOINTS = "checkpoints"
DIVERGED = "diverged"
"""State before a rejected step: its loss or gradients were not finite, or its loss was a spike."""
STACKS = "stacks"
"""Stack traces of each rank when a step hung or a collective failed."""


def last_record(directory: pathlib.Path) -> Record:
    """Returns the newest record of the finished run in a directory."""
    return list(RecordStore(directory / RECORD).read())[-1]


def audit_run(directory: pathlib.Path) -> tuple[int, list[AuditFinding]]:
    """Re-reads a run's training data; returns the number of steps and the audit findings."""
    config = read_config(directory / CONFIG)
    steps: list[AuditRow] = []
    skipped: list[AuditRow] = []
    reader = BatchReader(config.loader())
    try:
        for row in MetricsFile(directory / METRICS).read():
            if isinstance(row, StepRow):
                steps.append(
                    AuditRow(
                        step=row.step,
                        first_sample=row.first_sample,
                        num_samples=_batch_size(row, config),
                        digest=row.data_digest,
                    )
                )
            elif isinstance(row, EventRow) and row.name == SKIPPED and row.details is not None:
                # Samples that the run skipped on purpose do not count as missing.
                first, number = int(row.details[FIRST_SAMPLE]), int(row.details[NUM_SAMPLES])
                digest = reader.digest(first, number)
                skipped.append(audit_row(row.step, first, number, digest))
        return len(steps), check_audit([*steps, *skipped], reader.digest)
    finally:
        reader.close()


def _batch_size(row: StepRow, config: RunConfig) -> int:
    if config.parallel.elastic_batch == "kept":
        return config.training.batch_size
    # Replicas may be missing in some steps: derive the batch size from the cumulative tokens.
    return row.tokens // config.data.context_length - row.first_sample


def append_run_history(config: RunConfig) -> None:
    """Adds the predicted quantities of a finished run to the history."""
    path = history_path()
    append_history(path, predicted_and_measured(config, read_history(path)))


def predicted_and_measured(config: RunConfig, known: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    """Returns the predicted quantities of a finished run, paired with their measurements."""
    directory = pathlib.Path(config.out)
    record = last_record(directory)
    expected = msgspec.json.decode((directory / EXPECTATION).read_bytes(), type=Forecast)
    size = count_parameters(config.model.shape).total
    hardware = str(record.case["hardware"])
    world_size = int(str(record.case["world_size"]))
    measured = {name: metric.value for name, metric in record.metrics.items()}
    predictions: dict[Quantity, tuple[float | None, Estimate | None]] = {
        "heldout_loss": (None, expected.final_loss)
    }
    for quantity, formula in expected.formulas.items():
        predictions[quantity] = formula, corrected(quantity, formula, hardware, world_size, known)
    return [
        HistoryEntry(
            quantity=quantity,
            run=directory.resolve().name,
            parameters=size,
            world_size=world_size,
            threads=int(str(record.case["threads"])),
            hardware=hardware,
            formula=formula,
            predicted=predicted,
            measured=measured[quantity],
        )
        for quantity, (formula, predicted) in predictions.items()
        if predicted is not None and quantity in measured
    ]
