"""Collectives under one name, whichever version of torch there is.

torch 2.13 renames the collectives over one tensor to ``*_single`` and warns of the old names,
which are the only ones before it.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)
