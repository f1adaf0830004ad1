"""Memory traffic of what a block computes beside its matrix products.

Norms, dropout, softmax and activation functions do a few operations for each number that they read
or write, so that memory bandwidth alone sets their pace. Each line below counts the numbers that
one kernel reads and writes per token, h being `d_model`, a the width of all query heads, k that of
all key heads, f `d_ff`, n the number of heads and s the context length; backward reads the
gradient of the output, and of what was saved what it needs, and writes that of the input.

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

1/e stands for a mask of one byte beside numbers of e bytes. Attention that stores no scores has
neither of the last two. The loss reads and writes logits of v words in float32 ten times forward
and backward and converts them from and to the compute format. What matrix products themselves read
and write is not counted: with thousands of tokens they are bound by computing, but for those of
stored scores, whose traffic is `score_product_bytes`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from paceline.core.errors import UsageError
from paceline.planner.cost.layouts import CHECKPOINTING, Layouts, Workload

Division = Literal["stream", "tensor"]
"""stream: over tensor ranks with sequence parallelism only; tensor: always."""

_FLOAT32_BYTES = 4
_LOSS_TOUCHES = 10
"""Maximum, difference (2), exponential (2), sum, quotient (2), gradient (2)."""
_BRANCHES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elementwise:
    """One kind of kernel: what it reads and writes per token and layer, and how it is divided."""

    name: str
    forward_bytes: float
    backward_bytes: float
    division: Division
    num_forward: int
    """Kernels in forward; backward has as many."""
    of_scores: bool = False
    """Whether selective recomputation runs it again."""


def elementwise_operations(workload: Workload) -> tuple[Elementwise, ...]:
    """Returns the kernels of one block, as the table of the module counts them."""
    return tuple(_operations(workload))


def elementwise_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns what one device moves per token and layer, forward, backward and recomputed."""
    total: Any = 0.0
    for operation in elementwise_operations(workload):
        split = layouts.stream_split if operation.division == "stream" else layouts.tensor
        again = layouts.checkpointing == CHECKPOINTING["full"]
        if operation.of_scores:
            again = layouts.checkpointing != CHECKPOINTING["none"]
        moved = operation.backward_bytes + operation.forward_bytes * np.where(again, 2, 1)
        total = total + moved / split
    return total


def loss_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns what the loss moves per token, its vocabulary divided over the tensor ranks."""
    conversions = 2 * (workload.compute_bytes + _FLOAT32_BYTES)
    touched = _LOSS_TOUCHES * _FLOAT32_BYTES + conversions
    return touched * workload.shape.vocab_size / layouts.tensor


def score_product_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns what products with stored scores move per token and layer: 2 n s each way.

    Forward writes the scores and reads the probabilities; backward writes their gradient and reads
    probabilities and gradients three times.
    """
    if workload.attention == "flash":
        return np.zeros(np.shape(layouts.tensor))
    again = np.where(layouts.checkpointing == CHECKPOINTING["none"], 0, 2)
    scores = workload.shape.num_heads * workload.context_length * workload.compute_bytes
    return (6 + again) * scores / layouts.tensor


def num_kernels(layouts: Layouts, workload: Workload) -> Any:
    """Returns the kernels of one layer and pass: elementwise ones and matrix products."""
    shape = workload.shape
    products = (4 if shape.num_heads else 0) + (3 if shape.feed_forward == "swiglu" else 2)
    forward = products + sum(part.num_forward for part in elementwise_operations(workload))
    # A product has two gradients; an elementwise kernel one.
    backward = forward + products
    again = np.where(layouts.checkpointing == CHECKPOINTING["full"], forward, 0)
    return forward + backward + again


def _operations(workload: Workload) -> Iterator[Elementwise]:
    shape = workload.shape
    size = workload.compute_bytes
    branches = _BRANCHES if shape.num_heads else 1
    width = branches * shape.d_model
    mask = width if workload.dropout else 0
    bias = width * size if shape.biases else 0
    if shape.norm != "none":
        yield Elementwise(
            name="norms",
            forward_bytes=2 * size * width,
            backward_bytes=3 * size * width,
            division="stream",
            num_forward=branches,
        )
    yield Elementwise(
        name="residuals",
        forward_bytes=3 * size * width + mask,
        backward_bytes=3 * size * width + bias + (2 * size * width + mask if mask else 0),
        division="stream",
        num_forward=branches,
    )
    if shape.num_heads:
        yield from _attention(workload)
    gated = shape.feed_forward == "swiglu"
    plain_backward = 4 if shape.biases else 3
    if shape.feed_forward != "linear":
        yield Elementwise(
            name="activation function",
            forward_bytes=(5 if gated else 2) * size * shape.d_ff,
            backward_bytes=(8 if gated else plain_backward) * size * shape.d_ff,
            division="tensor",
            num_forward=2 if gated else 1,
        )


def _attention(workload: Workload) -> Iterator[Elementwise]:
    shape, size = workload.shape, workload.compute_bytes
    heads = shape.attention_width
    projected = heads + 2 * shape.key_value_width
    if shape.biases:
        yield Elementwise(
            name="biases of queries, keys and values",
            forward_bytes=2 * size * projected,
            backward_bytes=size * projected,
            division="tensor",
            num_forward=1,
        )
    if shape.positions == "rotary":
        rotated = 2 * size * (heads + shape.key_value_width)
        yield Elementwise(
            name="rotary positions",
            forward_bytes=rotated,
            backward_bytes=rotated,
            division="tensor",
            num_forward=2,
        )
    yield Elementwise(
        name="heads parted and joined",
        forward_bytes=2 * size * heads,
        backward_bytes=2 * size * (heads + projected),
        division="tensor",
        num_forward=1,
    )
    if workload.attention == "flash":
        if workload.dropout:
            raise UsageError(
                "Workload: dropout inside flash attention is not accounted for; "
                "use attention='naive', or dropout=False"
            )
        return
    scores = shape.num_heads * workload.context_length
    yield Elementwise(
        name="softmax",
        forward_bytes=2 * size * scores,
        backward_bytes=3 * size * scores,
        division="tensor",
        num_forward=1,
        of_scores=True,
    )
    if workload.dropout:
        yield Elementwise(
            name="dropout of scores",
            forward_bytes=(2 * size + 1) * scores,
            backward_bytes=(2 * size + 1) * scores,
            division="tensor",
            num_forward=1,
            of_scores=True,
        )
