"""What blocks keep for backward under any layout, for arrays of layouts at once.

Counted operation by operation, in bytes per token and block: h is `d_model`, a the width of all
query heads, k that of all key heads, f `d_ff`, n the number of heads, s the context length, e the
bytes of a number in the compute dtype.

    what is kept                              bytes             divided over tensor ranks
    layer norm: its input and output          2 e h             with sequence parallelism
    RMS norm: float32 input, root, scaled
      input, output                           4h + 4 + 2 e h    with sequence parallelism
    dropout of a branch: its mask             h                 with sequence parallelism
    queries, keys, values, attention's output e (2a + 2k)       always
    flash: logarithm of each row's sum        4 n               always
    stored scores: probabilities, and with
      dropout its mask and its output         e n s, or (2e + 1) n s   always
    activation function: input and output     2 e f             always
    gated: gate, up, activation, product      4 e f             always

Fused norms keep input and output, fused gates (2e + i) f; i is the bytes of a matmul's input, 1 in
float8 and e otherwise, and what is kept as such an input has i instead of e.

With two norms, 16-bit numbers, dropout and f = 4h that is Korthikanti et al. 2022:
s b h (10 + 24 / t + 5 a s / (h t)), and (s b h / t) (34 + 5 a s / h) with sequence parallelism.
For a gated block in bfloat16 with RMS norms and k = r h it is 20h + 8 + 4 r h + 8f + 4n, which a
test counts with torch's hooks, to the byte. Selective recomputation keeps no scores, full
recomputation the block's input only. torchtitan's selective recomputation saves the results of
every other matmul, which are those of query, value, gate and down, and attention's:
e (2h + 2a + k + f) + 4n with the block's input, all but that input divided over tensor ranks.

In a mixture f is the width that is active. A block with E experts, of which a token goes to j, also
keeps, divided over tensor ranks with sequence parallelism:

    inputs of experts, a copy for each          i j h
    outputs of experts, which are weighted      e j h, none where the gate is fused: it weights
    router: float32 probabilities and its map   5 E

That is as much as a device sends away, and it receives as much where experts are loaded evenly.
Latent attention also keeps what its projections go through, which is not counted.

A pipeline of p stages has up to p micro-batches in flight, so that the first stage keeps as many
blocks' activations as the whole model has; interleaving v parts per stage adds (p - 1) / (p v) of
them (Narayanan et al. 2021). Our trainer's stages have unequal numbers of blocks, so that another
than the first may keep most: r stages before the last it keeps r + 1 micro-batches. With fewer
micro-batches than that, only so many are there.
"""

from typing import Any

import numpy as np

from paceline.accounting.explanation import Quantity
from paceline.planner.cost.experts import Experts
from paceline.planner.cost.layouts import CHECKPOINTING, Layouts, Workload
from paceline.planner.trainer.stages import StageLoads, stage_loads

_FLOAT32_BYTES = 4


def block_bytes_per_token(
    layouts: Layouts, workload: Workload, *, checkpointing: Any = None
) -> Quantity:
    """Returns what a block keeps of one token on one device.

    `checkpointing` overrides that of the layouts: 0 gives what a block holds while it is computed
    again.
    """
    chosen = layouts.checkpointing if checkpointing is None else checkpointing
    scores = np.where(chosen == CHECKPOINTING["none"], score_bytes(workload), 0)
    split, tensor = Quantity(layouts.stream_split, "split"), Quantity(layouts.tensor, "tensor")
    block_input = Quantity(workload.compute_bytes * workload.shape.d_model, "input of a block")
    everything = (
        Quantity(stream_bytes(workload), "stream") / split
        + Quantity(matrix_bytes(workload), "matrices") / tensor
        + Quantity(scores, "scores") / tensor
    )
    if workload.experts is not None:
        routed = Quantity(routed_bytes(workload, workload.experts), "routed")
        everything = everything + routed / split
    if workload.framework_memory.selective == "odd matmuls":
        saved = Quantity(odd_matmul_bytes(workload), "odd matmuls") / tensor
        is_selective = chosen == CHECKPOINTING["selective"]
        everything = Quantity.choose(is_selective, block_input / split + saved, everything)
    return Quantity.choose(chosen == CHECKPOINTING["full"], block_input / split, everything)


def odd_matmul_bytes(workload: Workload) -> Any:
    """Returns what every other matmul and attention give for a token, all tensor ranks together."""
    shape, size = workload.shape, workload.compute_bytes
    queries_and_output = 2 * shape.attention_width
    matmuls = shape.key_value_width + shape.d_ff + shape.d_model
    return size * (queries_and_output + matmuls) + _FLOAT32_BYTES * shape.num_heads


def stream_bytes(workload: Workload) -> int:
    """Returns what norms and residuals keep of a token, all tensor ranks together."""
    shape, size = workload.shape, workload.compute_bytes
    branches = 2 if shape.has_attention else 1
    in_and_out = (size + _input_bytes(workload)) * shape.d_model
    norm = {
        "none": size * shape.d_model,
        "layernorm": in_and_out,
        "rmsnorm": in_and_out + _FLOAT32_BYTES
        if workload.framework_memory.fused
        else (_FLOAT32_BYTES + 2 * size) * shape.d_model + _FLOAT32_BYTES,
    }[shape.norm]
    return branches * (norm + (shape.d_model if workload.dropout else 0))


def matrix_bytes(workload: Workload) -> int:
    """Returns what attention and feed-forward keep of a token, but for scores."""
    shape, size = workload.shape, workload.compute_bytes
    heads = 2 * size * (shape.attention_width + shape.key_value_width)
    sums = _FLOAT32_BYTES * shape.num_heads if workload.attention == "flash" else 0
    product = _input_bytes(workload)
    gated = 2 if workload.framework_memory.fused else 3
    before = {"swiglu": gated, "gelu": 1, "linear": 0}[shape.feed_forward]
    # Attention's own backward needs its output in the compute dtype as well.
    again = product * shape.attention_width if product < size else 0
    return heads + sums + again + (before * size + product) * shape.d_ff


def routed_bytes(workload: Workload, experts: Experts) -> Any:
    """Returns what sending a token to experts keeps of it, in the mean block."""
    copies = experts.experts_per_token * workload.shape.d_model
    weighted = 0 if workload.framework_memory.fused else workload.compute_bytes
    router = (_FLOAT32_BYTES + 1) * experts.num_experts
    share = 1 - experts.num_dense_layers / workload.shape.num_layers
    return share * ((_input_bytes(workload) + weighted) * copies + router)


def _input_bytes(workload: Workload) -> int:
    """Returns the bytes of a number that is kept as a matmul's input."""
    return 1 if workload.framework_memory.float8_inputs else workload.compute_bytes


def score_bytes(workload: Workload) -> int:
    """Returns what attention that stores its scores keeps of a token."""
    if workload.attention == "flash":
        return 0
    size = workload.compute_bytes
    per_score = 2 * size + 1 if workload.dropout else size
    return per_score * workload.shape.num_heads * workload.context_length


def blocks_in_flight(layouts: Layouts, workload: Workload) -> tuple[Any, Any]:
    """Returns how many blocks' activations of one micro-batch two stages keep at most.

    These are the first stage and the last. The last keeps its own, and with interleaving those of
    its earlier parts, through which the following micro-batches go before the last part's first
    backward: (v - 1) p + 1 parts of L / (p v).
    """
    stages, parts = layouts.pipeline, layouts.pipeline_interleave
    first = 1 + np.where(parts > 1, (stages - 1) / (stages * parts), 0.0)
    last = ((parts - 1) * stages + 1) / (stages * parts)
    most = np.asarray(workload.num_micro_batches) / stages
    first_layers: Any = workload.shape.num_layers
    last_layers: Any = workload.shape.num_layers
    if workload.trainer_stages:
        loads = trainer_loads(layouts, workload)
        first_layers, last_layers = loads.in_flight, stages * loads.last
    return first_layers * np.minimum(first, most), last_layers * np.minimum(last, most)


def trainer_loads(layouts: Layouts, workload: Workload) -> StageLoads:
    """Returns what the fullest ranks of our trainer's pipelines have."""
    return stage_loads(
        workload.shape, workload.context_length, layouts.pipeline, layouts.pipeline_interleave
    )


def kept_activations(layouts: Layouts, workload: Workload) -> Quantity:
    """Returns what the first stage keeps for backward when most is in flight."""
    tokens = Quantity(workload.tokens, "tokens") / Quantity(layouts.context, "context")
    blocks = Quantity(blocks_in_flight(layouts, workload)[0], "blocks in flight")
    return block_bytes_per_token(layouts, workload) * tokens * blocks


def recomputed_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns what one block holds while backward computes it again; 0 where nothing is."""
    again = block_bytes_per_token(layouts, workload, checkpointing=CHECKPOINTING["none"])
    more = again.value - block_bytes_per_token(layouts, workload).value
    return more * workload.tokens / layouts.context


def whole_sequence_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns what a block holds of all tokens while sequence parallelism has them gathered."""
    one = workload.compute_bytes * workload.shape.d_model * workload.tokens / layouts.context
    is_split = layouts.sequence_parallel & (np.asarray(layouts.tensor) > 1)
    return np.where(is_split, workload.framework_memory.whole_sequences * one, 0.0)


def logit_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns what the loss holds: log-probabilities and two gradients of them, in float32."""
    tokens = workload.tokens / layouts.context
    per_logit = workload.framework_memory.logit_bytes
    return per_logit * tokens * workload.shape.vocab_size / layouts.tensor
