"""Pools of ranks on the session's devices, and where programs of ranks make their tensors.

A program is a function of a file of tests. On an accelerator, a tensor that such a file makes
without naming a device is made on the rank's device, so that one program runs on every device.
What the package makes is left alone: a device that it forgets stays forgotten, and the test fails.
A tensor of the host names its device, as `device="cpu"` or by `torch.from_numpy`.
"""

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

import paceline
from paceline.devices import accelerator
from paceline.parallel import RankPool
from tests import devices

_TESTS = str(pathlib.Path(__file__).parents[1])
_PACKAGE = str(pathlib.Path(paceline.__file__).parent)


class DevicePool(RankPool):
    """A pool whose programs run on the session's devices, and must end without a race."""

    def __init__(
        self, world_size: int, *, timeout_s: float, run_timeout_s: float | None = None
    ) -> None:
        if devices.is_accelerator() and world_size > accelerator.num_accelerators():
            pytest.skip(f"{world_size} ranks need a device each: {accelerator.num_accelerators()}")
        super().__init__(
            world_size, backend=devices.backend(), timeout_s=timeout_s, run_timeout_s=run_timeout_s
        )

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return super().run(_run_on_device, function, *arguments)


def _run_on_device(
    rank: int, world_size: int, function: Callable[..., Any], *arguments: Any
) -> Any:
    device = devices.device_of(rank)
    if not devices.is_accelerator():
        return function(rank, world_size, *arguments)
    devices.forget_hazards()
    with _MadeOn(device):
        result = function(rank, world_size, *arguments)
    accelerator.synchronize(device)
    if hazards := devices.hazards():
        raise AssertionError("\n".join(hazards))
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, result)


class _MadeOn(TorchFunctionMode):
    """Makes tensors for which tests name no device on this one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            function not in _device_constructors()
            or kwargs.get("device") is not None
            or isinstance(next(iter(args), None), torch.Tensor)  # as_tensor of one that has its own
            or not _is_called_by_a_test()
        ):
            return function(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator.device != self._device:
            # The same numbers on every device: they are the generator's.
            requires_grad = kwargs.pop("requires_grad", False)
            return function(*args, **kwargs).to(self._device).requires_grad_(requires_grad)
        return function(*args, **{**kwargs, "device": self._device})


def _is_called_by_a_test() -> bool:
    """Returns whether a file of tests is closer to the call than the package."""
    frame = sys._getframe(2)
    while frame is not None:
        whose = _owner(frame.f_code.co_filename)
        if whose is not None:
            return whose == "tests"
        frame = frame.f_back  # type: ignore[assignment]
    return False


@functools.cache
def _owner(file: str) -> str | None:
    if file == __file__:
        return None
    if file.startswith(_TESTS):
        return "tests"
    return "package" if file.startswith(_PACKAGE) else None
