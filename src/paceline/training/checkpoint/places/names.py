"""Names of checkpoint directories."""

import re

_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Returns the name of a step's directory; names sort in the order of steps."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Returns the step of a published checkpoint's directory, or None for any other name."""
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1])
