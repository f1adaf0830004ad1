"""How tests share the machine, and shapes of the numerical rooms checked at run time."""

import collections
import os
import tempfile
from typing import Any

import hypothesis
import jaxtyping
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

# How long an example takes is the machine's business: on a busy one it decides on nothing.
hypothesis.settings.register_profile(
    "paceline", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("paceline")
# What a test's runs teach is not to be mixed with what the user's runs do.
_HISTORY = tempfile.TemporaryDirectory()
os.environ["PACELINE_HISTORY"] = f"{_HISTORY.name}/history.jsonl"
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # Workers have a core each; more threads would only spin.
if not torch.cuda.is_available():
    # Triton looks when it is first imported: its kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Not the operators of torch, which it compiles, nor the kernels of Triton, whose source it reads.
CHECKED = [f"paceline.kernels.attention.{name}" for name in ("inputs", "reference", "tiled")]

with jaxtyping.install_import_hook([*CHECKED, "paceline.models"], "beartype.beartype"):
    import paceline.kernels
    import paceline.kernels.attention.tiled
    import paceline.models  # noqa: F401

_TOGETHER = {
    # What is left behind is looked for on the whole machine: nobody else uses the lab meanwhile.
    "tests/distributed/test_sessions.py": "lab",
    "tests/end_to_end/test_tutorial.py": "lab",
    # What they have in common is made once.
    "tests/end_to_end/test_train.py": "train",
    "tests/end_to_end/test_report_build.py": "report",
}
"""Files whose tests run one after another in one worker, and the name of what they share."""


@pytest.hookimpl(tryfirst=True)  # Before pytest leaves out what is slow.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes slow tests of the parameters that ``sampled(number)`` leaves out."""
    families: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            families[item.nodeid.partition("[")[0]].append(item)
    for family in families.values():
        mark = family[0].get_closest_marker("sampled")
        assert mark is not None
        number = min(mark.args[0], len(family))
        kept = {index * len(family) // number for index in range(number)}
        for index, item in enumerate(family):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


class _OneByOne(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each worker the next test, or the next group of tests that belong together."""

    def _split_scope(self, nodeid: str) -> str:
        return _TOGETHER.get(nodeid.partition("::")[0], nodeid)


def pytest_xdist_make_scheduler(config: Any, log: Any) -> _OneByOne:
    """Takes the place of ``--dist loadgroup``, which pytest 9 and xdist 3.8 ignore."""
    return _OneByOne(config, log)
