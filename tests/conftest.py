"""Shares the machine among test workers, and checks tensor shapes at run time."""

import collections
import os
import tempfile
import zlib
from typing import Any

import beartype
import hypothesis
import jaxtyping
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

# No deadlines: on a busy machine, the time of an example says nothing about the code.
hypothesis.settings.register_profile(
    "paceline", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("paceline")
# Keeps the history of test runs separate from that of the user's runs.
_HISTORY = tempfile.TemporaryDirectory()
os.environ["PACELINE_HISTORY"] = f"{_HISTORY.name}/history.jsonl"
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # Each worker has one core; more threads would only spin.
if not torch.cuda.is_available():
    # Triton reads this when it is first imported, and then runs its kernels in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Excludes torch operators, which torch compiles, and Triton kernels, whose source Triton reads.
CHECKED = [f"paceline.kernels.attention.{name}" for name in ("reference", "tiled")]

with jaxtyping.install_import_hook([*CHECKED, "paceline.models"], "beartype.beartype"):
    import paceline.kernels
    import paceline.kernels.attention.tiled
    import paceline.models  # noqa: F401
    from paceline.kernels.attention.layout import BackwardInputs, ForwardInputs

# Of `layout` only these: its functions check their arguments themselves.
for _inputs in (ForwardInputs, BackwardInputs):
    jaxtyping.jaxtyped(_inputs, typechecker=beartype.beartype)

_TOGETHER = {
    # These look for leftovers on the whole machine, so no other test may use the lab meanwhile.
    "tests/distributed/test_sessions.py": "lab",
    "tests/distributed/test_sites.py": "lab",
    "tests/end_to_end/test_tutorial.py": "lab",
    # These share expensive fixtures, which one worker builds once.
    "tests/end_to_end/test_train.py": "train",
    "tests/end_to_end/test_report_build.py": "report",
    "tests/unit/loop/test_run.py": "loop",
}
"""Files whose tests run sequentially in one worker, and the name of their shared resource."""


_ALL_ON_ACCELERATORS = (
    "tests/emulated/",
    *(f"tests/distributed/test_{name}.py" for name in ("data_parallel_gpu", "training")),
)
"""Where all parameters that run on a CPU for every change also run on an accelerator."""
_SLOW_ON_ACCELERATORS = (
    *(
        f"tests/distributed/test_{name}.py"
        for name in (
            *("capture", "checkpoint_memory", "exchange", "hugging_face", "initial_parts"),
            *("layout_benchmark", "model_states", "prediction_messages"),
            *("samples", "watch_corruption", "watch_losses"),
        )
    ),
    *(f"tests/end_to_end/test_{name}.py" for name in ("communication", "data_parallel", "train")),
)
"""Files of which a change runs nothing on an accelerator, to be quick; every night runs them."""


@pytest.hookimpl(tryfirst=True)  # Before pytest deselects slow tests.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the parameters that ``sampled(number)`` leaves out as slow.

    On an accelerator every test has one parameter for every change, and tests of the host none.
    """
    # Late: the hook of jaxtyping comes first.
    from tests import devices

    on_accelerator = devices.is_accelerator()
    families: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        host = item.get_closest_marker("host")
        if on_accelerator and host is not None:
            item.add_marker(pytest.mark.skip(reason=f"on a CPU only: {host.args[0]}"))
        if not item.get_closest_marker("slow"):
            families[item.nodeid.partition("[")[0]].append(item)
    for name, family in families.items():
        mark = family[0].get_closest_marker("sampled")
        number = len(family) if mark is None else min(mark.args[0], len(family))
        kept = {index * len(family) // number for index in range(number)}
        if on_accelerator and not name.startswith(_ALL_ON_ACCELERATORS):
            # Another one for each test, so that all containers and layouts are among them.
            able = [n for n, item in enumerate(family) if not item.get_closest_marker("skip")]
            chosen = able[zlib.crc32(name.encode()) % len(able)] if able else 0
            kept = set() if name.startswith(_SLOW_ON_ACCELERATORS) else {chosen}
        for index, item in enumerate(family):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


class _OneByOne(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each worker the next test, or the next group of tests that must run together."""

    def _split_scope(self, nodeid: str) -> str:
        return _TOGETHER.get(nodeid.partition("::")[0], nodeid)


def pytest_xdist_make_scheduler(config: Any, log: Any) -> _OneByOne:
    """Replaces ``--dist loadgroup``, which pytest 9 and xdist 3.8 ignore."""
    return _OneByOne(config, log)
