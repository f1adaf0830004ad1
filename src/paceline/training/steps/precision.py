"""What lowers the precision of a forward pass."""

import contextlib
from typing import Literal

import torch


def autocast(
    precision: Literal["float32", "bfloat16"], device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """Returns what a forward pass is computed in.

    Args:
        precision: As the config names it.
        device: Where it is computed.
    """
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
