"""When computing hides communication: the smallest batch at which a mesh is compute-bound.

For a feed-forward layer of width F on N = X Y devices, X of which shard data and weights (FSDP) and
Y the matrices (tensor parallelism), B tokens per step, in the notation of the scaling book for
TPUs. gamma = C / W is what a device computes per byte that one link brings; M_X and M_Y count the
axes of the network that each dimension of the mesh may use.

    FSDP alone      B / X > gamma / M_X
    tensor alone    Y < M_Y F / gamma
    both            F / (Y M_X) + B / (X M_Y) < B F / (N gamma)

The left side of the last is the time of gathering weights plus that of exchanging activations, the
right side that of computing, in the same unit. Where the two communications run at the same time
the larger counts, instead of their sum. The best split of N has X = sqrt(B N M_X / (F M_Y)), at
which both communications take equally long. All functions take arrays.
"""

from typing import Any, Literal

import numpy as np

from paceline.accounting.communication.collectives import Numbers

Communications = Literal["add", "overlap"]
"""Whether the communications of the two dimensions run one after the other or together."""


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
    """Returns the B above which a given mesh is compute-bound; infinite where none is enough."""
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
    B = N gamma² / (F M_X M_Y) where they overlap, and four times that where they add.
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
