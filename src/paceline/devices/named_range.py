"""Named ranges, visible to torch's profiler and, on a GPU, to NVIDIA's tools as NVTX ranges."""

import contextlib
from collections.abc import Iterator

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from paceline.devices import accelerator


def named_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Marks the enclosed code; costs almost nothing when no tool records ranges."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()  # A compiled graph has no ranges, and torch would warn.
    if accelerator.has_named_ranges():
        return _range_on_gpu(name)
    return _range_for_profiler(name)


def _range_for_profiler(name: str) -> contextlib.AbstractContextManager[object]:
    # torch's ranges cost microseconds even without a profiler.
    return record_function(name) if _profiler_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def _range_on_gpu(name: str) -> Iterator[None]:
    accelerator.push_range(name)
    try:
        with _range_for_profiler(name):
            yield
    finally:
        accelerator.pop_range()
