"""What a training step keeps for backward, and the most that it holds beside the model's states.

For `paceline.models.TransformerLM` in float32, eager, with torch's fused attention on a CPU. Each
number below is a float32 per token; d is `d_model`, a the width of all query heads, k that of all
key heads, h the number of query heads, f `d_ff`, v the vocabulary. Autograd saves

    a norm            its input, the root of the mean square, the input without it, and its
                      output for the matrices that follow            3d + 1
    attention         queries, keys, values, the logarithm of each row's sum, the output, and the
                      output with heads joined, which is a copy       3a + 2k + h
    feed-forward      gate, up, the gate's activation, the product    4f
    final norm, head  3d + 1 and, for the loss, log-probabilities     3d + 1 + v

so that a block saves 6d + 2 + 3a + 2k + h + 4f. With full activation checkpointing it saves its
input alone, d, until backward reaches it. The loss saves one number more, its sum of weights. A
test counts the same with torch's hooks, to the byte.

The most is held while backward is still in the last layers, at one of four moments. Beside all that
is saved until then:

    loss            the gradients of the log-probabilities and of the logits    2v
    head            those of the logits and of its input, its weights'          v + d, and vd
    down matrix     those of the stream and of its input, its weights'          d + f, and df
    product         those of the stream, the product and both its factors       d + 3f

What a weight's gradient takes does not grow with the tokens. By the head, the log-probabilities
have been released; by the down matrix, what final norm and head had saved; by the product, that
matrix's input. The loss is there all the time. For every block that it will compute again,
torch also keeps the state of the random generator. Where `d_ff` is at least `d_model`, the sum is
exact to the byte as well; in narrower feed-forward layers, norms and attention may hold more.
"""

from typing import Literal

from paceline.core.specs import BatchShape, ModelShape, require_buildable

Checkpointing = Literal["none", "full"]

_FLOAT32_BYTES = 4
# What torch.get_rng_state returns on a CPU.
_GENERATOR_STATE_BYTES = 5056


def saved_for_backward_bytes(
    shape: ModelShape, batch: BatchShape, activation_checkpointing: Checkpointing = "none"
) -> int:
    """Returns what autograd keeps when forward is over, without weights and tokens."""
    require_buildable(shape)
    blocks = shape.num_layers * block_bytes(shape, batch, activation_checkpointing)
    return blocks + _FLOAT32_BYTES * (batch.tokens_per_pass * _final(shape) + 1)


def block_bytes(
    shape: ModelShape, batch: BatchShape, activation_checkpointing: Checkpointing = "none"
) -> int:
    """Returns what autograd keeps of one block when forward is over."""
    per_token = _block(shape) if activation_checkpointing == "none" else shape.d_model
    return _FLOAT32_BYTES * batch.tokens_per_pass * per_token


def peak_activation_bytes(
    shape: ModelShape,
    batch: BatchShape,
    activation_checkpointing: Checkpointing = "none",
    *,
    keeps_gradients: bool = False,
) -> int:
    """Returns the most that activations, and gradients while they are made, take.

    Where weights' gradients lie afterwards is not part of this, unless `keeps_gradients` says that
    they stay where they were made; then this is the most at the beginning of backward only, and
    the more of them there are, the later the whole backward's peak is.
    """
    tokens, width, hidden = batch.tokens_per_pass, shape.d_model, shape.d_ff
    vocabulary = shape.vocab_size
    loss = 1
    saved = saved_for_backward_bytes(shape, batch, activation_checkpointing) // _FLOAT32_BYTES
    saved += loss
    recomputed = generators = 0
    if activation_checkpointing == "full":
        # Its input is there already.
        recomputed = _block(shape) - width
        generators = shape.num_layers * _GENERATOR_STATE_BYTES
    in_last_block = saved + tokens * (recomputed - _final(shape) + width)
    head_weights, down_weights = vocabulary * width, width * hidden
    if keeps_gradients:
        in_last_block += head_weights + width
    most = max(
        saved + tokens * 2 * vocabulary,
        saved + tokens * width + head_weights,
        in_last_block + tokens * hidden + down_weights,
        in_last_block + tokens * 2 * hidden + (down_weights if keeps_gradients else 0),
    )
    return _FLOAT32_BYTES * most + generators


def _block(shape: ModelShape) -> int:
    attention = 3 * shape.attention_width + 2 * shape.key_value_width + shape.num_heads
    return 2 * _norm(shape) + attention + 4 * shape.d_ff


def _final(shape: ModelShape) -> int:
    return _norm(shape) + shape.vocab_size


def _norm(shape: ModelShape) -> int:
    return 3 * shape.d_model + 1
