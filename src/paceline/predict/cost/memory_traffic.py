"""Memory traffic of a block outside its matmuls.

Norms, dropout, softmax and activation functions do few operations per element, so they are bound by
memory bandwidth. Each line below counts the elements that one kernel reads and writes per token. h
is `d_model`, a the width of all query heads, k that of all key heads, f `d_ff`, n the number of
heads and s the context length. Backward reads the gradient of the output and the saved tensors, and
writes the gradient of the input.

    operation                         forward      backward     divided over tensor ranks
    norm, two per block               2 h          3 h          with sequence parallelism
    residual, two per block           3 h          3 h          with sequence parallelism
    dropout on it, fused              1/e h        2 h + 1/e h  with sequence parallelism
    bias of the output, fused         0            h            with sequence parallelism
    bias of queries, keys, values     2 (a + 2k)   a + 2k       always
    rotary positions                  2 (a + k)    2 (a + k)    always
    heads parted and joined           2 a          2 a + 2 (a + 2k)   always
    gated activation                  5 f          8 f          always
    plain activation, bias fused      2 f          3 f (+ f for its bias)   always
    softmax of stored scores          2 n s        3 n s        always
    dropout of stored scores          2 n s + 1/e n s   2 n s + 1/e n s     always

1/e is a mask of one byte per element of e bytes. Flash attention has neither of the last two. The
loss reads or writes float32 logits ten times, forward and backward together, and converts them from
and to the compute dtype. The traffic of matmuls is not counted: with thousands of tokens they are
compute-bound. The exceptions are matmuls with stored scores, whose traffic is
`score_product_bytes`.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from paceline.core.errors import UsageError
from paceline.predict.cost.layouts import CHECKPOINTING, Layouts, Workload

Division = Literal["stream", "tensor"]
"""stream: divided over tensor ranks only with sequence parallelism; tensor: always."""

_FLOAT32_BYTES = 4
_LOSS_TOUCHES = 10
"""Maximum, difference (2), exponential (2), sum, quotient (2), gradient (2)."""


_FUSED_LOSS_TOUCHES = 3
"""The loss reads the logits twice and overwrites them with their gradient."""


class Elementwise(NamedTuple):
    """One kind of kernel: bytes moved per token and layer, and their division over ranks."""

    name: str
    forward_bytes: float
    backward_bytes: float
    division: Division
    num_forward: int
    """Number of kernels in forward; backward has the same number."""
    of_scores: bool = False
    """Whether selective recomputation repeats it."""


def elementwise_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns the bytes that elementwise kernels move per token and layer on one device.

    Includes forward, backward and recomputation.
    """
    total: Any = 0.0
    for operation in elementwise_operations(workload):
        split = layouts.stream_split if operation.division == "stream" else layouts.tensor
        again = workload.forwards(layouts) > 1
        if operation.of_scores:
            again = layouts.checkpointing != CHECKPOINTING["none"]
        moved = operation.backward_bytes + operation.forward_bytes * np.where(again, 2, 1)
        total = total + moved / split
    return total


def loss_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns the bytes that the loss moves per token; tensor ranks divide the vocabulary."""
    if workload.fused_loss:
        fused = _FUSED_LOSS_TOUCHES * workload.compute_bytes
        return fused * workload.shape.vocab_size / layouts.tensor
    conversions = 2 * (workload.compute_bytes + _FLOAT32_BYTES)
    touched = _LOSS_TOUCHES * _FLOAT32_BYTES + conversions
    return touched * workload.shape.vocab_size / layouts.tensor


def score_product_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns the bytes that matmuls with stored scores move per token and layer.

    Forward moves 2 n s elements: it writes the scores and reads the probabilities. Backward moves
    4 n s: it writes the gradient once, and reads probabilities and gradients three times in total.
    """
    if workload.attention == "flash":
        return np.zeros(np.shape(layouts.tensor))
    again = np.where(layouts.checkpointing == CHECKPOINTING["none"], 0, 2)
    scores = workload.shape.num_heads * workload.context_length * workload.compute_bytes
    return (6 + again) * scores / layouts.tensor


def num_kernels(layouts: Layouts, workload: Workload) -> Any:
    """Returns the number of kernels per layer and pass, elementwise and matmuls."""
    shape = workload.shape
    matmuls = (4 if shape.has_attention else 0) + (3 if shape.feed_forward == "swiglu" else 2)
    forward = matmuls + sum(part.num_forward for part in elementwise_operations(workload))
    # A matmul computes two gradients, an elementwise kernel one.
    backward = forward + matmuls
    again = np.where(layouts.checkpointing == CHECKPOINTING["full"], forward, 0)
    return forward + backward + again


def expert_kernels(layouts: Layouts, workload: Workload) -> Any:
    """Returns the number of matmul kernels of the local experts per layer and pass.

    Two matrices (gate and up together, and down), forward and twice backward.
    """
    if workload.experts is None:
        return 0.0
    again = np.where(layouts.checkpointing == CHECKPOINTING["full"], 4 / 3, 1.0)
    return 6 * workload.experts.num_experts / np.asarray(layouts.expert) * again


def elementwise_operations(workload: Workload) -> Iterator[Elementwise]:
    """Yields the elementwise operations of a block, as in the module's table."""
    shape = workload.shape
    size = workload.compute_bytes
    branches = 2 if shape.has_attention else 1
    width = branches * shape.d_model
    stream = size * width
    mask = width if workload.dropout else 0
    if shape.block_norms:
        normed = size * shape.block_norms * shape.d_model
        yield Elementwise("norms", 2 * normed, 3 * normed, "stream", shape.block_norms)
    residual_backward = 3 * stream + (stream if shape.biases else 0)
    residual_backward += 2 * stream + mask if workload.dropout else 0
    yield Elementwise("residuals", 3 * stream + mask, residual_backward, "stream", branches)
    if shape.has_attention:
        yield from _attention(workload)
    hidden = size * shape.d_ff
    if shape.feed_forward == "swiglu":
        yield Elementwise("activation function", 5 * hidden, 8 * hidden, "tensor", 2)
    elif shape.feed_forward != "linear":
        backward = (4 if shape.biases else 3) * hidden
        yield Elementwise("activation function", 2 * hidden, backward, "tensor", 1)


def _attention(workload: Workload) -> Iterator[Elementwise]:
    shape, size = workload.shape, workload.compute_bytes
    heads = size * shape.attention_width
    projected = heads + 2 * size * shape.key_value_width
    if shape.biases:
        name = "biases of queries, keys and values"
        yield Elementwise(name, 2 * projected, projected, "tensor", 1)
    if shape.positions == "rotary":
        rotated = 2 * size * (shape.attention_width + shape.key_value_width)
        yield Elementwise("rotary positions", rotated, rotated, "tensor", 2)
    joined_backward = 2 * (heads + projected)
    yield Elementwise("heads parted and joined", 2 * heads, joined_backward, "tensor", 1)
    if workload.attention == "flash":
        if workload.dropout:
            raise UsageError(
                "Workload: dropout inside flash attention is not accounted for; "
                "use attention='naive', or dropout=False"
            )
        return
    scores = shape.num_heads * workload.context_length
    yield Elementwise("softmax", 2 * size * scores, 3 * size * scores, "tensor", 1, True)
    if workload.dropout:
        thinned = (2 * size + 1) * scores
        yield Elementwise("dropout of scores", thinned, thinned, "tensor", 1, True)
