"""Measures the peak memory of a step.

The hand-outs require three points: after the model is built, before the optimizer step, and after
it. They are taken in a later step, when the optimizer's state exists: in the first step,
activations hide it. On CUDA the allocator tracks the peak. On a CPU it is computed from the
profiler's allocation events; the kernel's count of resident pages is reported separately.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from paceline.traces.memory.peak import peak_allocations


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes that the tensors occupy, shared storage counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def step_peaks(
    device: torch.device,
    *,
    resident_tensors: Iterable[Tensor],
    phases: dict[str, Callable[[], None]],
) -> dict[str, int]:
    """Runs the phases of one step in order and returns the peak bytes of each.

    `resident_tensors` exist before the step, and the step does not release them.
    """
    if device.type != "cuda":
        resident = storage_bytes(resident_tensors)
        return {name: resident + peak for name, peak in peak_allocations(phases).items()}
    peaks = {}
    for name, run in phases.items():
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        peaks[name] = torch.cuda.max_memory_allocated(device)
    return peaks
