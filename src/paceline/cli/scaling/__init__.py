"""``paceline scaling``, ``sweep`` and ``loop``: extrapolation from small runs to a large one."""

import math

from paceline.core.errors import UsageError


def require_positive(options: dict[str, float | None]) -> None:
    """Raises an error for an option that is given but not positive and finite."""
    for flag, value in options.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{flag} is {value:g}; it must be positive and finite")
