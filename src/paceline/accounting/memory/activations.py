"""What a training step keeps for backward, and the most that it holds beside the model's states.

For `paceline.models.TransformerLM`, eager, on a CPU. Both numbers are counted operation by
operation: `paceline.accounting.memory.forward_pass` says what each operation keeps and what its
derivative makes, `paceline.accounting.memory.autograd_tape` adds up. In float32 the operations keep
the following numbers per token, where d is `d_model`, a the width of all query heads, k that of all
key heads, h the number of query heads, s the tokens of a sequence, f `d_ff`, v the vocabulary:

    a norm              its input, the root of the mean square, the input without it, and its
                        output for the matrices that follow            3d + 1
    attention, fused    queries, keys, values, the logarithm of each row's sum, the output, and
                        the output with heads joined, which is a copy  3a + 2k + h
    attention, naive    queries, keys and values, repeated for every query head, probabilities,
                        the output with heads joined                   4a + hs
                        and, per block, a mask of s² bytes
    feed-forward        gate, up, the gate's activation, the product   4f
    final norm, head    3d + 1 and, for the loss, log-probabilities    3d + 1 + v

With one head or sequences of one token, joining heads copies nothing, and fused attention keeps a
less. With full activation checkpointing a block keeps its input alone, d, until backward reaches
it. The loss keeps one number more, its sum of weights.

Under autocast to bf16 or fp16, the stream, the norms' three numbers, the logarithms, the
probabilities and what the loss keeps stay in float32; all else takes half. A norm's output is
copied for every matrix that reads it: thrice before attention, twice before feed-forward. Naive
attention keeps its probabilities in that dtype as well. Weights that were cast are kept too; they
are a category of their own, since they do not grow with tokens.

In a model whose weights are in bf16 or fp16, a norm converts its input and its weights to float32
and keeps the copies, the latter among the copies of weights; its output exists once.

The peak is the most over all operations of forward and backward: often at the loss, where the
gradients of log-probabilities and logits are there, or in the last block's feed-forward layer. It
is exact as far as torch's operations go. What kernels take for themselves while they run is not
counted: torch's fused attention and, for bf16 matmuls, oneDNN have scratch memory, whose
size depends on the processor.
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
    """Bytes that autograd keeps when forward is over, without weights, tables and tokens."""

    activations: int
    """What grows with the tokens."""
    weight_copies: int
    """Copies of weights in another dtype."""

    @property
    def total(self) -> int:
        """Both together."""
        return self.activations + self.weight_copies


class ActivationCount(NamedTuple):
    """What a forward and backward pass hold beside the model's states, in bytes."""

    saved: SavedForBackward
    peaks: tuple[int, int]
    """The peak until backward has come to the blocks, and the peak from then on."""


class BucketSize(NamedTuple):
    """Sizes of one bucket of gradients."""

    num_tensors: int
    num_bytes: int = 0
    """Bytes that are freed when the bucket is reduce-scattered."""
    arriving_bytes: int = 0
    """Bytes that the other ranks send of their buckets at the same time."""
    group_bytes: int = 0
    """Bytes of gradients that move into the bucket together."""


def saved_for_backward_bytes(
    shape: ModelShape,
    batch: BatchShape,
    activation_checkpointing: Checkpointing = "none",
    *,
    precision: Precision = _FLOAT32,
    attention: AttentionImplementation = "sdpa",
) -> int:
    """Returns all that autograd keeps when forward is over, without weights and tokens.

    Args:
        shape: The model's dimensions.
        batch: Sequences of a pass, and their length.
        activation_checkpointing: full if each block's activations are recomputed in backward.
        precision: dtypes of weights, gradients, state and arithmetic.
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
    """Returns the most that activations, and gradients while they are made, take.

    Where weights' gradients lie afterwards is not part of this, unless `keeps_gradients` says that
    they stay where they were made. `shape`, `batch`, `activation_checkpointing`, `precision` and
    `attention` are those of `saved_for_backward_bytes`.
    """
    counted = count_activations(
        shape, batch, activation_checkpointing, precision, attention, keeps_gradients
    )
    return max(counted.peaks)


@functools.lru_cache(maxsize=1024)
def count_activations(
    shape: ModelShape,
    batch: BatchShape,
    activation_checkpointing: Checkpointing = "none",
    precision: Precision = _FLOAT32,
    attention: AttentionImplementation = "sdpa",
    keeps_gradients: bool = False,
    buckets: tuple[BucketSize, ...] = (),
) -> ActivationCount:
    """Counts what is kept when forward is over, and the peaks of forward and backward.

    With `buckets`, which hold all gradients in the order of backward, gradients move into their
    bucket, whose bytes are there from its first gradient to its last.
    """
    require_buildable(shape)
    _require_countable(precision)
    tape = Tape(keeps_gradients=keeps_gradients)
    forward = ForwardPass(
        tape, shape, batch, precision, attention, activation_checkpointing == "full"
    )
    backward = forward.parameters[::-1]
    for num_tensors, *sizes in buckets:
        tape.collect(backward[:num_tensors], *sizes)
        backward = backward[num_tensors:]
    loss = forward.loss()
    saved = SavedForBackward(
        activations=tape.kept_bytes("activation"), weight_copies=tape.kept_bytes("weight_copy")
    )
    first_gradient = tape.allocate(loss.buffer.num_bytes)
    # Whoever calls backward holds the loss and its gradient until the end.
    tape.play_back(loss, tape.hold(first_gradient))
    return ActivationCount(saved, (tape.peak_before_mark_bytes, tape.peak_bytes))


def _require_countable(precision: Precision) -> None:
    """Refuses formats in which the model would run other operations than those counted."""
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
