"""Autocast context of a forward pass."""

import contextlib
from typing import Literal

import torch


def autocast(
    precision: Literal["float32", "bfloat16"], device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """Returns the context manager for a forward pass.

    Args:
        precision: dtype to compute in, as named in the config.
        device: Device to compute on.
    """
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
