"""What a run imports late, imported before ranks are forked instead of in each of them."""

import importlib

# torch's optimizers import its compiler when they are made, with or without compiled blocks: 2 s.
_LATE = (
    "torch._dynamo",
    "torch.profiler",
    "numpy.random",
    "rich.live",
    "paceline.training.run",
    "paceline.training.checkpoint.torch_storage.reader",
)


def preload() -> None:
    """Imports what is imported late otherwise."""
    for name in _LATE:
        importlib.import_module(name)
