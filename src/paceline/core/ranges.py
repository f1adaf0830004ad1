"""Names of the ranges that a training step is divided into, wherever it is traced."""

import re
from typing import NamedTuple

_PREFIX = "paceline::"

STEP = _PREFIX + "step"
"""A whole step; may be followed by a slash and what is special about it."""
FORWARD = _PREFIX + "forward"
BACKWARD = _PREFIX + "backward"
OPTIMIZER = _PREFIX + "optimizer"
ATTENTION_SCORES = _PREFIX + "attention_scores"
ATTENTION_SOFTMAX = _PREFIX + "attention_softmax"
ATTENTION_VALUES = _PREFIX + "attention_values"
WAIT = _PREFIX + "wait"
"""Where a step does nothing but wait for communication."""

_BUCKET = _PREFIX + "bucket_"
_PIPELINE = _PREFIX + "pipeline/"
_PIPELINE_RANGE = re.compile(_PIPELINE + r"(\w+)/(\d{1,6})(?:/(\d{1,6}))?")


def step_range(label: str) -> str:
    """Names a step."""
    return f"{STEP}/{label}" if label else STEP


def step_label(name: str) -> str | None:
    """Returns what is special about a step; None if the range is no step."""
    if name == STEP:
        return ""
    return name.removeprefix(STEP + "/") if name.startswith(STEP + "/") else None


def bucket_range(number: int) -> str:
    """Names the start of a bucket's message."""
    return f"{_BUCKET}{number}"


def is_bucket_range(name: str) -> bool:
    """Whether a range is the start of a bucket's message."""
    return name.startswith(_BUCKET)


class PipelineRange(NamedTuple):
    """The work of one stage of a pipeline for one micro-batch."""

    phase: str
    """forward, loss, backward, or weights: gradients of weights, where the schedule computes them
    apart from those of inputs."""
    stage: int
    micro_batch: int | None
    """None for the loss, which belongs to the forward just before it."""

    @property
    def name(self) -> str:
        """The range's name in a trace."""
        end = "" if self.micro_batch is None else f"/{self.micro_batch}"
        return f"{_PIPELINE}{self.phase}/{self.stage}{end}"


def pipeline_range(name: str) -> PipelineRange | None:
    """Returns what a stage does in a range; None if the range is no stage's work."""
    match = _PIPELINE_RANGE.fullmatch(name)
    if match is None:
        return None
    phase, stage, micro_batch = match.groups()
    return PipelineRange(phase, int(stage), None if micro_batch is None else int(micro_batch))


def short_name(name: str) -> str:
    """Returns a range's name as people are shown it."""
    return name.removeprefix(_PREFIX)
