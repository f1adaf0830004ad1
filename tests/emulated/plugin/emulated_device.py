"""The device type "emulated" and the process-group backend "emulated".

With this folder on PYTHONPATH, every process that imports torch has the device, also the ranks and
commands that a test starts: torch loads what the entry point group `torch.backends` names.
"""

import contextlib
import functools
import pathlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

NAME = "emulated"


def _library() -> types.ModuleType:
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    try:
        import build  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    return build.library()  # type: ignore[no-any-return]


C: Any = None
"""The extension, once loaded."""


def autoload() -> None:
    """Registers the device with torch, once per process."""
    global C
    if C is not None:
        return
    C = _library()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    dist.Backend.register_backend(NAME, _make_group, devices=[NAME])
    # torch declares this for CUDA: a group of gloo may be made beside one of the device.
    dist.Backend.backend_capability["gloo"].append(NAME)
    # torch calls this on ranks that are not in a new group; those of NCCL take part in its making.
    C.Group.perform_nocolor_split = lambda _group, _device: None
    torch.nn.Module.to = _keeping_parameters(torch.nn.Module.to)  # type: ignore[method-assign]


def _keeping_parameters(move: Any) -> Any:
    """Returns a `Module.to` that keeps parameters, and so ties, as on devices in torch's list.

    The flag is not left on: `load_state_dict` would swap parameters as well.
    """

    @functools.wraps(move)
    def to(module: torch.nn.Module, *arguments: Any, **keywords: Any) -> torch.nn.Module:
        device, *_ = torch._C._nn._parse_to(*arguments, **keywords)
        if device is None:  # Only other devices need other parameters.
            return move(module, *arguments, **keywords)  # type: ignore[no-any-return]
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return move(module, *arguments, **keywords)  # type: ignore[no-any-return]
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return to


def _make_group(store: dist.Store, rank: int, size: int, timeout: Any) -> dist.Backend:
    return C.make_group(store, rank, size, timeout, dist.ProcessGroupGloo)  # type: ignore[no-any-return]


def _index(device: Any) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    chosen = torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
    return torch.accelerator.current_device_index() if chosen.index is None else chosen.index


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> "_Stream":
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> "_Event":
        own = torch.device(NAME, _index(None))
        return super().__new__(cls, device=own, enable_timing=enable_timing)


@contextlib.contextmanager
def _in_stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@contextlib.contextmanager
def _on_device(device: Any) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    if device is not None and _index(device) >= 0:
        torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _device_module() -> types.ModuleType:
    """Returns what would be `torch.cuda`, as far as torch itself asks for it."""
    made: Any = types.ModuleType(f"torch.{NAME}")

    def rng_state(device: Any = None) -> torch.Tensor:
        return C.default_generator(_index(device)).get_state()  # type: ignore[no-any-return]

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        C.default_generator(_index(device)).set_state(state)

    def memory(name: str, device: Any = None) -> int:
        return int(C.memory(_index(device))[name])

    made.is_available = lambda: True
    made.is_initialized = lambda: True
    made.init = made._lazy_init = lambda: None
    made._is_in_bad_fork = lambda: False
    made.device_count = C.num_devices
    made.current_device = torch.accelerator.current_device_index
    made.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    made.device = _on_device
    made.get_device_name = lambda _device=None: "Emulated accelerator"
    made.Stream, made.Event, made.stream = _Stream, _Event, _in_stream
    made.StreamContext = _in_stream
    made.current_stream = torch.accelerator.current_stream
    made.set_stream = torch.accelerator.set_stream
    made.synchronize = torch.accelerator.synchronize
    made.manual_seed = made.manual_seed_all = C.seed
    made.default_generators = [C.default_generator(index) for index in range(C.num_devices())]
    made.get_rng_state, made.set_rng_state = rng_state, set_rng_state
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32]
    made.is_bf16_supported = lambda *_, **__: True
    made.memory_allocated = lambda device=None: memory("allocated", device)
    made.max_memory_allocated = lambda device=None: memory("peak_allocated", device)
    made.memory_reserved = lambda device=None: memory("reserved", device)
    made.empty_cache = torch.accelerator.empty_cache
    made.mem_get_info = torch.accelerator.get_memory_info
    return made


# What tests ask of the device.


def hazards() -> Sequence[str]:
    """Returns races, too early frees and changed pinned memory since `clear`."""
    return list(C.hazards())


def synchronizations() -> list[tuple[str, str]]:
    """Returns how and where the host has waited for the device since `clear`."""
    return [tuple(each) for each in C.synchronizations()]


def clear() -> None:
    """Waits for the device, and forgets hazards and synchronisations."""
    torch.accelerator.synchronize()
    C.clear_hazards()
    C.clear_synchronizations()


@contextlib.contextmanager
def forbidden_synchronizations() -> Iterator[None]:
    """Makes every wait of the host an error whose traceback names the line."""
    C.forbid_synchronizations(True)
    try:
        yield
    finally:
        C.forbid_synchronizations(False)


@contextlib.contextmanager
def delays(seed: int, most_us: int = 300) -> Iterator[None]:
    """Delays tasks at random, so that streams overtake each other in another way for each seed."""
    C.delay_tasks(seed, most_us)
    try:
        yield
    finally:
        C.delay_tasks(0, 0)


def fuse_kernels() -> None:
    """Makes this process run as one operator what CUDA runs as one: see `fused_kernels`."""
    import fused_kernels  # type: ignore[import-not-found]

    fused_kernels.register()


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """Fills freed memory with NaN."""
    C.poison_freed(True)
    try:
        yield
    finally:
        C.poison_freed(False)
