"""Metrics rows of a run: one per step, evaluation and event, and the file that holds them."""

import os

import msgspec

from paceline.records.row_file import RowFile


class StepRow(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step", tag_field="kind"
):
    """Metrics of one training step."""

    step: int
    """Number of completed steps, including this one."""
    tokens: int
    """Tokens that the run has trained on so far."""
    loss: float
    gradient_norm: float
    learning_rate: float
    step_time_s: float
    """Time on the first rank, from the end of the previous step to the end of this one."""
    data_wait_s: float
    """Part of the step time spent waiting for the batch."""
    first_sample: int
    """Position of the batch's first sample in the stream of samples."""
    data_digest: str
    """Digest of the batch's samples, for audits of what was trained on."""
    exposed_communication_s: float | None = None
    """Part of the step time spent waiting for other ranks' gradients; sampled every few steps."""
    memory_bytes: int | None = None
    """Resident memory of the first rank, or the peak of its GPU's tensors; sampled every few
    steps."""


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """Evaluation of the model on held-out text."""

    step: int
    loss: float
    bits_per_byte: float
    sample: str | None = None
    """The model's continuation of the prompt."""
    time_s: float | None = None
    """How long training paused for it."""


class EventRow(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="event", tag_field="kind"
):
    """A single event, such as started, saved or stopped."""

    step: int
    name: str
    message: str
    time_s: float | None = None
    """How long training paused for it."""
    details: dict[str, float | int | str] | None = None
    """Additional values by name."""


STARTED = "started"
"""Event at the start of every attempt of a run, and after every rollback."""
RESTARTED = "restarted"
"""Event of ranks that were restarted after a failure."""
SAVED = "saved"
"""Event of a saved checkpoint."""
CHECKPOINT = "checkpoint"
"""Event of a state that was restored from memory or disk, or could not be kept in memory."""
REPLICAS = "replicas"
"""Event of replicas that join or leave, or of a step that they repeat."""
FINISHED = "finished"
"""Event after the last step."""
CORRUPTED = "corrupted"
"""Event of silently corrupted weights or optimizer state."""
SKIPPED = "skipped"
"""Event of samples that the run skips because of the loss that they led to."""
FIRST_SAMPLE, NUM_SAMPLES = "first_sample", "num_samples"
"""Keys in the details of a SKIPPED event: position of the first sample, number of samples."""
SPIKE = "spike"
"""Event of a loss spike whose update was applied."""
STRAGGLER = "straggler"
"""Event of a rank that slows down the others."""
LOST = "lost"
"""Event of a rank that does not respond, or is behind when a step hangs."""
INCIDENTS = (CORRUPTED, LOST)
"""Events that are kept when a run goes back to an earlier step."""

MetricsRow = StepRow | EvaluationRow | EventRow


class MetricsFile(RowFile[MetricsRow]):
    """Metrics file of a run.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, MetricsRow, "a row of a run")
