"""Names of the ranges of a training step in traces."""

import re
from typing import NamedTuple

_PREFIX = "paceline::"

STEP = _PREFIX + "step"
"""A whole step; may be followed by a slash and a label."""
FORWARD = _PREFIX + "forward"
BACKWARD = _PREFIX + "backward"
OPTIMIZER = _PREFIX + "optimizer"
ATTENTION_SCORES = _PREFIX + "attention_scores"
ATTENTION_SOFTMAX = _PREFIX + "attention_softmax"
ATTENTION_VALUES = _PREFIX + "attention_values"
WAIT = _PREFIX + "wait"
"""Time in which a step only waits for communication."""

_BUCKET = _PREFIX + "bucket_"
_PIPELINE = _PREFIX + "pipeline/"
_PIPELINE_RANGE = re.compile(_PIPELINE + r"(\w+)/(\d{1,6})(?:/(\d{1,6}))?")


def step_range(label: str) -> str:
    """Returns the range name of a step, with its label if there is one."""
    return f"{STEP}/{label}" if label else STEP


def step_label(name: str) -> str | None:
    """Returns the label of a step; None if the range is not a step."""
    if name == STEP:
        return ""
    return name.removeprefix(STEP + "/") if name.startswith(STEP + "/") else None


def bucket_range(number: int) -> str:
    """Returns the range name for launching the communication of a bucket."""
    return f"{_BUCKET}{number}"


def is_bucket_range(name: str) -> bool:
    """Returns whether a range launches the communication of a bucket."""
    return name.startswith(_BUCKET)


class PipelineRange(NamedTuple):
    """The work of one pipeline stage for one micro-batch."""

    phase: str
    """forward, loss, backward, or weights: weight gradients, if the schedule computes them
    separately from input gradients."""
    stage: int
    micro_batch: int | None
    """None for the loss, which belongs to the preceding forward pass."""

    @property
    def name(self) -> str:
        """The range's name in a trace."""
        end = "" if self.micro_batch is None else f"/{self.micro_batch}"
        return f"{_PIPELINE}{self.phase}/{self.stage}{end}"


def pipeline_range(name: str) -> PipelineRange | None:
    """Returns the stage work that a range name stands for; None for any other range."""
    match = _PIPELINE_RANGE.fullmatch(name)
    if match is None:
        return None
    phase, stage, micro_batch = match.groups()
    return PipelineRange(phase, int(stage), None if micro_batch is None else int(micro_batch))


def short_name(name: str) -> str:
    """Returns the display name of a range, without the prefix."""
    return name.removeprefix(_PREFIX)
