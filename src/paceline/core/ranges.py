"""Names of the ranges that a training step is divided into, wherever it is traced."""

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


def short_name(name: str) -> str:
    """Returns a range's name as people are shown it."""
    return name.removeprefix(_PREFIX)
