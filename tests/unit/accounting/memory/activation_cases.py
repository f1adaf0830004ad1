"""Bytes that one block saves for backward: the difference of models with two layers and one."""

import dataclasses
from typing import Any

from paceline.accounting.memory.activations import saved_for_backward_bytes
from paceline.core import BatchShape, ModelShape


def block_bytes(shape: ModelShape, batch: BatchShape, **options: Any) -> int:
    """Returns the bytes that autograd saves for one block in forward."""
    one, two = (
        saved_for_backward_bytes(
            dataclasses.replace(shape, num_layers=num_layers), batch, **options
        )
        for num_layers in (1, 2)
    )
    return two - one
