"""How much memory a step takes, and how much there is.

Three points, as the hand-outs ask: after the model is made, before the optimizer steps, and
after. They are taken in a later step, when the optimizer's state exists: the first step
alone hides it behind the activations. On CUDA the allocator keeps the peak; on a CPU the
profiler's allocation events give it, and the kernel's own count of resident pages stands
beside.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from paceline.traces.memory.peak import peak_allocations


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns what the tensors occupy, shared storage counted once."""
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
    """Runs the phases of one step in their order and returns the peak bytes of each.

    `resident_tensors` is what exists before the step and is not released by it.
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
