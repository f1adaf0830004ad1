"""The smallest batch at which a mesh is compute-bound, so that compute hides communication.

The notation is that of the scaling book for TPUs. A feed-forward layer of width F runs on N = X Y
devices, with X-way FSDP (data and weights sharded), Y-way tensor parallelism (matrices sharded) and
B tokens per step. gamma = C / W is the FLOPs of a device per byte over one link. M_X and M_Y are
the numbers of network axes that each dimension of the mesh may use.

    FSDP alone      B / X > gamma / M_X
    tensor alone    Y < M_Y F / gamma
    both            F / (Y M_X) + B / (X M_Y) < B F / (N gamma)

In the last line, the left side is the time to gather weights plus the time to exchange activations,
and the right side is the compute time, in the same unit. If the two communications overlap, the
larger one counts instead of their sum. The best split of N has X = sqrt(B N M_X / (F M_Y)), at
which both communications take equally long. All functions accept arrays.
"""

from typing import Any, Literal

import numpy as np

from paceline.accounting.communication.collectives import Numbers

Communications = Literal["add", "overlap"]
"""Whether the two dimensions communicate one after the other (add) or concurrently (overlap)."""


def smallest_batch_tokens(
    gamma: Numbers,
    d_ff: Numbers,
    *,
    fsdp: Numbers,
    tensor: Numbers,
    fsdp_axes: Numbers,
    tensor_axes: Numbers,
    communications: Communications,
) -> Any:
    """Returns the B above which a given mesh is compute-bound; infinite if no B is enough."""
    fsdp, tensor, width = (np.asarray(each, dtype=np.float64) for each in (fsdp, tensor, d_ff))
    compute = width / (fsdp * tensor * gamma)
    weights = width / (tensor * fsdp_axes)
    activations = 1 / (fsdp * tensor_axes)
    spare = compute - activations
    needed = weights / (spare if communications == "add" else compute)
    return np.where(spare > 0, needed, np.inf)


def smallest_batch_tokens_of_any_mesh(
    gamma: Numbers,
    d_ff: Numbers,
    *,
    num_devices: Numbers,
    fsdp_axes: Numbers,
    tensor_axes: Numbers,
    communications: Communications,
) -> Any:
    """Returns the B above which the best split of the devices is compute-bound.

    At the best split both communications equal sqrt(F B / (N M_X M_Y)), so that
    B = N gamma² / (F M_X M_Y) if they overlap, and four times that if they add.
    """
    needed = np.asarray(num_devices, dtype=np.float64) * np.square(gamma, dtype=np.float64)
    together = needed / (np.asarray(d_ff, dtype=np.float64) * fsdp_axes * tensor_axes)
    return together * (4 if communications == "add" else 1)


def best_fsdp(
    batch_tokens: Numbers,
    d_ff: Numbers,
    *,
    num_devices: Numbers,
    fsdp_axes: Numbers,
    tensor_axes: Numbers,
) -> Any:
    """Returns the X of the best split, sqrt(B N M_X / (F M_Y)), not rounded."""
    ratio = np.multiply(batch_tokens, fsdp_axes) / np.multiply(d_ff, tensor_axes)
    return np.sqrt(ratio * num_devices)
