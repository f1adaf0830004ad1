"""What a run measures of itself: a row per step, in a file that only grows."""

import os

import msgspec

from paceline.records.row_file import RowFile


class StepRow(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step", tag_field="kind"
):
    """One training step, as all ranks agree on it."""

    step: int
    """Steps that are done, this one included."""
    tokens: int
    """Tokens that the run has trained on."""
    loss: float
    gradient_norm: float
    learning_rate: float
    step_time_s: float
    """Of the first rank: from one step's end to the next."""
    data_wait_s: float
    """Of that, waiting for the batch."""
    first_sample: int
    """Position in the stream of samples at which the batch begins."""
    data_digest: str
    """Digest of the batch's samples, so that what was trained on can be checked afterwards."""
    exposed_communication_s: float | None = None
    """Of that, waiting for other ranks' gradients; looked at every few steps."""
    memory_bytes: int | None = None
    """Of the first rank: resident, or the peak of a GPU's tensors; looked at every few steps."""


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """The model on held-out text."""

    step: int
    loss: float
    bits_per_byte: float
    sample: str | None = None
    """How the model continues the prompt."""
    time_s: float | None = None
    """How long training stood still for it."""


class EventRow(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="event", tag_field="kind"
):
    """Something that happened once: started, saved, stopped."""

    step: int
    name: str
    message: str
    time_s: float | None = None
    """How long training stood still for it."""
    details: dict[str, float | int | str] | None = None
    """What is known of it besides, by name."""


STARTED = "started"
"""The event with which every attempt of a run begins, and every return to a checkpoint."""
RESTARTED = "restarted"
"""The event of ranks that were started again after a failure."""
SAVED = "saved"
"""The event of a checkpoint."""
CHECKPOINT = "checkpoint"
"""The event of a state that came from memory or disk, or could not be kept."""
REPLICAS = "replicas"
"""The event of replicas that come or go."""
FINISHED = "finished"
"""The event after the last step."""
CORRUPTED = "corrupted"
"""The event of weights or optimizer state that have changed by themselves."""
SKIPPED = "skipped"
"""The event of samples that the run leaves out, because of the loss that they led to."""
FIRST_SAMPLE, NUM_SAMPLES = "first_sample", "num_samples"
"""What such an event has in its details: where the samples begin, and how many there are."""
SPIKE = "spike"
"""The event of a loss far above the last ones, with which the step was taken all the same."""
STRAGGLER = "straggler"
"""The event of a rank that holds up the others."""
LOST = "lost"
"""The event of a rank that the others have waited for in vain."""
INCIDENTS = (CORRUPTED, LOST)
"""Events that a run remembers when it goes back to a step before them."""

MetricsRow = StepRow | EvaluationRow | EventRow


class MetricsFile(RowFile[MetricsRow]):
    """The rows of a run; the first rank writes.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, MetricsRow, "a row of a run")
