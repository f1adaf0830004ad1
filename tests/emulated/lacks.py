"""What the emulated device cannot do yet, and the tests that need it: they are skipped on it.

A line goes when the device learns what it names.
"""

import re

_LACKS = {"named ranges on the device's timeline": r"test_profile\.py::test_a_step_is_profiled"}
"""By what is missing: a pattern of the names of the tests that need it."""


def lack_of(test: str) -> str | None:
    """Returns what a test needs and the device does not have; None if it may run."""
    return next((what for what, tests in _LACKS.items() if re.search(tests, test)), None)
