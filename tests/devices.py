"""The device that a session of tests is about: the CPU, the emulated accelerator, or a real one.

`PACELINE_TEST_DEVICE` names it; `scripts/test emulated` and `scripts/test --gpu` set it. Tests of
ranks take their device and backend from here, so that the same tests run on each.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.devices import accelerator
from paceline.parallel import Session
from paceline.parallel.ranks.placement import local_placement


def device_of(rank: int) -> torch.device:
    """Returns a rank's device."""
    kind = accelerator.device_type(os.environ.get("PACELINE_TEST_DEVICE", "cpu"))
    return accelerator.nth_device(kind, rank)


def own_device() -> torch.device:
    """Returns the device of the rank that asks."""
    return device_of(dist.get_rank())


def backend() -> str:
    """Returns the backend of the device's process groups."""
    return accelerator.default_backend(device_of(0).type)


def session_of(rank: int, world_size: int) -> Session:
    """Returns what a trainer is told of a rank of a pool."""
    placement = local_placement("spawn", rank, world_size)
    return Session(placement=placement, device=device_of(rank), backend=backend())


def of_commands() -> str:
    """Returns what commands are told: they find an accelerator, whatever it is called."""
    return "auto" if is_accelerator() else "cpu"


def is_accelerator() -> bool:
    """Returns whether the session is about an accelerator."""
    return device_of(0).type != "cpu"


def is_emulated() -> bool:
    """Returns whether the session is about the emulated accelerator."""
    return device_of(0).type == "emulated"


def emulated() -> Any:
    """Returns what tests ask of the emulated accelerator."""
    import emulated_device  # type: ignore[import-not-found]

    return emulated_device


def hazards() -> Sequence[str]:
    """Returns races of this process so far; none of a device that cannot tell."""
    return emulated().hazards() if is_emulated() else []


def forget_hazards() -> None:
    """Waits for the device, and forgets races so far."""
    if is_emulated():
        emulated().clear()
