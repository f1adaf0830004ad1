"""What one block keeps for backward, told from models that differ by one."""

import dataclasses
from typing import Any

from paceline.accounting import saved_for_backward_bytes
from paceline.core import BatchShape, ModelShape


def block_bytes(shape: ModelShape, batch: BatchShape, **options: Any) -> int:
    """Returns what autograd keeps of one block when forward is over."""
    one, two = (
        saved_for_backward_bytes(
            dataclasses.replace(shape, num_layers=num_layers), batch, **options
        )
        for num_layers in (1, 2)
    )
    return two - one
