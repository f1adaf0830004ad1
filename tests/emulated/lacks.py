"""What the emulated device cannot do yet, and the tests that need it: they are skipped on it.

A line goes when the device learns what it names.
"""

import re

_LACKS = {
    "convolutions": r"::test_.*\[(.*-)?shapes(-.*)?\]",
    "batch normalisation": (
        r"test_data_parallel\.py::test_(buffers_follow_the_first_rank|buffers_that_were_replaced"
        r"_are_followed|evaluation_does_not_communicate|two_forward_passes_before_one_backward)"
    ),
    "complex numbers": r"::test_complex_gradients_are_averaged_in_another_dtype",
    "the backward pass of a mean squared error": r"::test_the_courses_loop",
    "sparse gradients": (
        r"::test_(sparse_gradients_are|what_cannot_be_sharded_is|what_cannot_work_is)"
        r"_refused_by_name"
    ),
    "inference mode": r"::test_evaluation_frees_everything",
    "named ranges on the device's timeline": r"test_profile\.py::test_a_step_is_profiled",
    "recurrent layers": r"::test_.*\[(.*-)?recurrent(-.*)?\]",
}
"""By what is missing: a pattern of the names of the tests that need it."""


def lack_of(test: str) -> str | None:
    """Returns what a test needs and the device does not have; None if it may run."""
    return next((what for what, tests in _LACKS.items() if re.search(tests, test)), None)
