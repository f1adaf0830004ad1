"""Imports in the parent process what every forked rank would otherwise import late."""

import importlib

# Constructing a torch optimizer imports torch._dynamo, even without compiled blocks: 2 s.
_LATE = (
    "torch._dynamo",
    "torch.profiler",
    "numpy.random",
    "rich.live",
    "paceline.training.run",
    "paceline.checkpoint.restore",
)


def preload() -> None:
    """Imports the modules that are otherwise imported late."""
    for name in _LATE:
        importlib.import_module(name)
