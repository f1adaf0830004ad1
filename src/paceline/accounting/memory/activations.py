"""Activations saved for backward, and the peak memory of a step beyond the model states.

Both apply to `paceline.models.TransformerLM`, eager, and are counted operation by operation:
`paceline.accounting.memory.forward_pass` lists what each operation saves and what its derivative
allocates, and `paceline.accounting.memory.autograd_tape` adds it up. In float32 the operations save
the following numbers per token, where d is `d_model`, a the total width of the query heads, k that
of the key heads, h the number of query heads, s the tokens per sequence, f `d_ff`, v the vocabulary
size:

    a norm              its input, the root mean square, the normalized input, and its output for
                        the matrices that follow                       3d + 1
    attention, fused    queries, keys, values, the log-sum-exp of each row, the output, and the
                        output with heads joined, which is a copy      3a + 2k + h
    attention, naive    queries, keys and values, repeated for every query head, probabilities,
                        the output with heads joined                   4a + hs
                        and, per block, a mask of s² bytes
    feed-forward        gate, up, the gate's activation, the product   4f
    final norm, head    3d + 1 and, for the loss, log-probabilities    3d + 1 + v

On an accelerator a norm is one operation, which does not save the normalized input: 2d + 1 instead
of 3d + 1. Attention is counted as FlashAttention on both: its output has the layout of its queries.

With one head or sequences of one token, joining heads copies nothing, and fused attention saves a
fewer numbers. With full activation checkpointing a block saves only its input, d, until backward
reaches it. The loss saves one more number, its sum of weights.

Under autocast to bf16 or fp16, the residual stream, the norms' three numbers, the log-sum-exps, the
probabilities and what the loss saves stay in float32; everything else takes half. A norm's output
is copied for every matrix that reads it: three times before attention, twice before feed-forward.
Naive attention also saves its probabilities in the lower dtype. Cast weights are saved too; they
are a separate category, since they do not grow with the number of tokens.

In a model with bf16 or fp16 weights, a norm converts its input and its weights to float32 and saves
the copies, the latter as weight copies; its output exists once.

The peak is the maximum over all operations of forward and backward. It is often at the loss, where
the gradients of log-probabilities and logits exist together, or in the last block's feed-forward
layer. It is exact for torch's operations. Scratch memory inside kernels is not counted: torch's
fused attention and, for bf16 matmuls, oneDNN allocate some, and its size depends on the processor.
The loss is computed outside of autocast, whose copies of weights are freed before it, unless an
operation has saved them.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

from paceline.accounting.memory.autograd_tape import Tape
from paceline.accounting.memory.forward_pass import ForwardPass
from paceline.core.errors import UsageError
from paceline.core.specs import (
    AttentionImplementation,
    BatchShape,
    ModelShape,
    Precision,
    require_buildable,
)

Checkpointing = Literal["none", "full"]

_FLOAT32 = Precision()
_COMPUTED = ("float32", "tfloat32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedForBackward:
    """Bytes that autograd has saved after forward, without weights, tables and tokens."""

    activations: int
    """Bytes that grow with the number of tokens."""
    weight_copies: int
    """Bytes of weights copied to another dtype."""

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.activations + self.weight_copies


class ActivationCount(NamedTuple):
    """Bytes of a forward and backward pass beyond the model states."""

    saved: SavedForBackward
    peak: int


def saved_for_backward_bytes(
    shape: ModelShape,
    batch: BatchShape,
    activation_checkpointing: Checkpointing = "none",
    *,
    precision: Precision = _FLOAT32,
    attention: AttentionImplementation = "sdpa",
) -> int:
    """Returns the bytes that autograd has saved after forward, without weights and tokens.

    Args:
        shape: The model's dimensions.
        batch: Sequences per pass, and their length.
        activation_checkpointing: full if each block's activations are recomputed in backward.
        precision: dtypes of weights, gradients, optimizer state and compute.
        attention: sdpa if attention is fused, naive if it stores its scores.
    """
    counted = count_activations(shape, batch, activation_checkpointing, precision, attention)
    return counted.saved.total


def peak_activation_bytes(
    shape: ModelShape,
    batch: BatchShape,
    activation_checkpointing: Checkpointing = "none",
    *,
    precision: Precision = _FLOAT32,
    attention: AttentionImplementation = "sdpa",
    keeps_gradients: bool = False,
) -> int:
    """Returns the peak bytes of activations and of gradients while backward computes them.

    Complete weight gradients are not counted, unless `keeps_gradients` is true: then they stay
    where backward allocated them. `shape`, `batch`, `activation_checkpointing`, `precision` and
    `attention` are those of `saved_for_backward_bytes`.
    """
    counted = count_activations(
        shape, batch, activation_checkpointing, precision, attention, keeps_gradients
    )
    return counted.peak


@functools.lru_cache(maxsize=1024)
def count_activations(
    shape: ModelShape,
    batch: BatchShape,
    activation_checkpointing: Checkpointing = "none",
    precision: Precision = _FLOAT32,
    attention: AttentionImplementation = "sdpa",
    keeps_gradients: bool = False,
    on_accelerator: bool = False,
) -> ActivationCount:
    """Counts the bytes saved after forward, and the peak of forward and backward."""
    tape = Tape(keeps_gradients=keeps_gradients)
    loss = record_forward(
        tape, shape, batch, activation_checkpointing, precision, attention, on_accelerator
    ).loss()
    saved = SavedForBackward(
        activations=tape.kept_bytes("activation"), weight_copies=tape.kept_bytes("weight_copy")
    )
    first_gradient = tape.allocate(loss.buffer.num_bytes)
    # The caller of backward holds the loss and its gradient until the end.
    tape.play_back(loss, tape.hold(first_gradient))
    return ActivationCount(saved, tape.peak_bytes)


def record_forward(
    tape: Tape,
    shape: ModelShape,
    batch: BatchShape,
    activation_checkpointing: Checkpointing,
    precision: Precision,
    attention: AttentionImplementation,
    on_accelerator: bool,
) -> ForwardPass:
    """Returns a forward pass that will be recorded on a tape; raises if it cannot be counted."""
    require_buildable(shape)
    _require_countable(precision)
    recomputes = activation_checkpointing == "full"
    return ForwardPass(tape, shape, batch, precision, attention, recomputes, on_accelerator)


def _require_countable(precision: Precision) -> None:
    """Raises for dtypes in which the model would run other operations than those counted."""
    uncounted = {precision.parameters, precision.compute} - set(_COMPUTED)
    if uncounted:
        raise UsageError(
            f"activations in {min(uncounted)} are not accounted for; use one of "
            f"{', '.join(_COMPUTED)}"
        )
    if precision.autocast and precision.parameters != "float32":
        raise UsageError(
            f"autocast over {precision.parameters} parameters is not accounted for; "
            "use float32 parameters, or no autocast"
        )
    if not precision.autocast and precision.compute not in (precision.parameters, "tfloat32"):
        raise UsageError(
            f"parameters in {precision.parameters} are multiplied in {precision.compute} only "
            "under autocast; set Precision.autocast, or give both the same dtype"
        )
