"""What the package needs of the device that a rank computes on, the same for every kind of device.

This module is the only one that knows how a kind of accelerator is called and what only some kinds
offer. The others compare a device's type with "cpu" at most, and call functions that also accept
the CPU. Most functions stand on `torch.accelerator`, so that CUDA, ROCm and XPU take one path; what
torch offers for some kinds only (named ranges, the allocator's history, access between peers) is
left out on the others.

An accelerator runs asynchronously to the host. Its timestamps are therefore events in the current
stream, and a duration can only be read after waiting for the device. On a CPU, a timestamp is a
reading of the host's clock, and there are no streams.
"""

import itertools
import pathlib
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from paceline.core.errors import UsageError
from paceline.core.hardware import CUDA

Moment: TypeAlias = float | torch.Event
_HISTORY_ENTRIES = 1_000_000
_ACTIVITIES = {CUDA: ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
_WITHOUT_STREAMS = ("cpu", "meta")
"""Types of devices on which an operation is over when its call returns; meta computes nothing."""
_WITHOUT_COLLECTIVES = "gloo"
"""torch's default backend for devices on which ranks cannot communicate, such as Apple's."""


def accelerator_type() -> str | None:
    """Returns the type of this machine's accelerators, such as cuda; None if there are none.

    ROCm's devices are of the type cuda. Apple's do not count: they have no collectives.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or default_backend(found.type) == _WITHOUT_COLLECTIVES:
        return None
    return found.type


def num_accelerators() -> int:
    """Returns the number of accelerators that this process sees."""
    return 0 if accelerator_type() is None else torch.accelerator.device_count()


def device_type(name: str) -> str:
    """Returns the type of device that auto, cpu or a type means; raises if there is none here."""
    own = accelerator_type()
    if name == "auto":
        return own or "cpu"
    if name in {"cpu", own}:
        return name
    kind = "CUDA" if name == CUDA else name
    instead = "cpu" if own is None else f"{own} or cpu"
    raise UsageError(f"torch sees no {kind} device here; use the device {instead}")


def nth_device(kind: str, index: int) -> torch.device:
    """Returns a device of a type; all ranks of a host share its CPU."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, index)


def all_accelerators() -> list[torch.device]:
    """Returns the accelerators that this process sees."""
    kind = accelerator_type()
    return [torch.device(kind, index) for index in range(num_accelerators())] if kind else []


def select(device: torch.device) -> None:
    """Makes a device the one that this thread uses by default."""
    if device.type not in _WITHOUT_STREAMS:
        torch.accelerator.set_device_index(device)


def selected_device(types: Sequence[torch.device]) -> torch.device:
    """Returns this thread's accelerator if it is of one of the types, and else the CPU."""
    kind = accelerator_type()
    if kind is not None and torch.device(kind) in types:
        return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device("cpu")


def default_backend(kind: str) -> str:
    """Returns the backend of collectives between devices of a type: nccl, xccl, or gloo of CPUs."""
    return dist.get_default_backend_for_device(kind)


def device_type_of_backend(backend: str) -> str:
    """Returns the type of device between which a backend communicates."""
    own = accelerator_type()
    return own if own is not None and default_backend(own) == backend else "cpu"


# Streams, events and clocks.


def now(device: torch.device) -> Moment:
    """Returns a timestamp of the current point on a device's timeline."""
    return time.perf_counter() if device.type in _WITHOUT_STREAMS else _recorded(device, timed=True)


def seconds_between(start: Moment, end: Moment) -> float:
    """Returns the seconds between two timestamps of the same device."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.Event)
    assert isinstance(end, torch.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def current_stream(device: torch.device) -> torch.Stream | None:
    """Returns the current stream of an accelerator; None for a CPU, which has none."""
    return None if device.type in _WITHOUT_STREAMS else torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> torch.Stream | None:
    """Returns a stream beside the current one; None for a CPU."""
    return None if device.type in _WITHOUT_STREAMS else torch.Stream(device)


def point_in_stream(device: torch.device) -> torch.Event | None:
    """Returns the current point of the current stream, for other streams to wait for."""
    return None if device.type in _WITHOUT_STREAMS else _recorded(device, timed=False)


def _recorded(device: torch.device, *, timed: bool) -> torch.Event:
    event = torch.Event(device, enable_timing=timed)
    event.record(torch.accelerator.current_stream(device))
    return event


def wait_in_stream(device: torch.device, point: torch.Event) -> None:
    """Makes the current stream wait for a point of another; the host does not wait."""
    point.wait(torch.accelerator.current_stream(device))


def follow(device: torch.device, stream: torch.Stream) -> None:
    """Makes the current stream wait for all work queued in another; the host does not wait."""
    torch.accelerator.current_stream(device).wait_stream(stream)


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has completed all queued work; does nothing for a CPU."""
    if device.type not in _WITHOUT_STREAMS:
        torch.accelerator.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Waits for the work queued in the current stream, not for messages in other streams."""
    if device.type not in _WITHOUT_STREAMS:
        torch.accelerator.current_stream(device).synchronize()


# Memory.


def pins_memory(device: torch.device) -> bool:
    """Returns whether copies from and to host memory need pinned memory to be asynchronous."""
    return device.type not in _WITHOUT_STREAMS


def send_numbers(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """Returns numbers of the host as float64 on a device, to which they travel without a wait."""
    host = torch.tensor(numbers, dtype=torch.float64, pin_memory=pins_memory(device))
    return host.to(device, non_blocking=True)


def allocated_bytes(device: torch.device) -> int:
    """Returns the memory of an accelerator's tensors."""
    return torch.accelerator.memory_allocated(device)


def peak_allocated_bytes(device: torch.device) -> int:
    """Returns the peak of the memory of an accelerator's tensors since its last reset."""
    return torch.accelerator.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Begins a new peak of an accelerator's memory."""
    torch.accelerator.reset_peak_memory_stats(device)


def free_cached_memory(device: torch.device) -> None:
    """Returns freed memory that torch keeps to an accelerator."""
    if device.type not in _WITHOUT_STREAMS:
        torch.accelerator.empty_cache()


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Returns the free and the total memory of an accelerator."""
    free, total = torch.accelerator.get_memory_info(device)
    return free, total


# What a device is called, and its generator.


def device_name(device: torch.device) -> str:
    """Returns the name of an accelerator as its driver reports it."""
    return str(torch.get_device_module(device.type).get_device_name(device))


def peer_links() -> list[str]:
    """Returns the pairs of accelerators with direct access to each other's memory, if known."""
    found = []
    for first, second in itertools.combinations(all_accelerators(), 2):
        has_access = getattr(torch.get_device_module(first.type), "can_device_access_peer", None)
        if has_access is not None and has_access(first.index, second.index):
            found.append(f"{first} <-> {second} peer access")
    return found


def random_state(device: torch.device) -> bytes | None:
    """Returns the state of an accelerator's generator; None for a CPU, whose is torch's own."""
    if device.type in _WITHOUT_STREAMS:
        return None
    return bytes(torch.get_device_module(device.type).get_rng_state(device).numpy().tobytes())


def set_random_state(device: torch.device, state: bytes) -> None:
    """Sets the state of an accelerator's generator."""
    numbers = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    torch.get_device_module(device.type).set_rng_state(numbers, device)


# Profiling.


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """Returns what torch's profiler has to record on the host and on a device."""
    activities = [ProfilerActivity.CPU]
    if device.type not in _WITHOUT_STREAMS:
        activities.append(_ACTIVITIES.get(device.type, ProfilerActivity.PrivateUse1))
    return activities


def start_memory_history(device: torch.device) -> None:
    """Begins to record every allocation, if torch can on this kind of accelerator."""
    if (recorder := _memory_recorder(device)) is not None:
        recorder._record_memory_history(max_entries=_HISTORY_ENTRIES)


def write_memory_history(device: torch.device, path: pathlib.Path) -> None:
    """Writes the recorded allocations for torch's memory viewer."""
    if (recorder := _memory_recorder(device)) is not None:
        recorder._dump_snapshot(str(path))


def stop_memory_history(device: torch.device) -> None:
    """Ends the record of allocations."""
    if (recorder := _memory_recorder(device)) is not None:
        recorder._record_memory_history(enabled=None)


def _memory_recorder(device: torch.device) -> Any:
    if device.type in _WITHOUT_STREAMS:
        return None
    recorder = getattr(torch.get_device_module(device.type), "memory", None)
    return recorder if hasattr(recorder, "_record_memory_history") else None


def has_named_ranges() -> bool:
    """Returns whether this process uses a device whose tools show named ranges (NVTX)."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def push_range(name: str) -> None:
    """Begins a named range on the host's timeline of NVIDIA's tools."""
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]


def pop_range() -> None:
    """Ends the innermost named range."""
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
