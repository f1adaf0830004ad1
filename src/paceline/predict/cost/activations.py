"""Activation memory kept for backward under any layout, for arrays of layouts.

Counted per operation, in bytes per token and block. h is `d_model`, a the width of all query heads,
k that of all key heads, f `d_ff`, n the number of heads, s the context length, e the bytes of an
element in the compute dtype.

    kept tensors                              bytes             divided over tensor ranks
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

Fused norms keep input and output, fused gates (2e + i) f. i is the bytes of an element of a
matmul's input: 1 in float8 and e otherwise. Tensors kept as such an input use i instead of e.

With two norms, 16-bit elements, dropout and f = 4h this is Korthikanti et al. 2022:
s b h (10 + 24 / t + 5 a s / (h t)), and (s b h / t) (34 + 5 a s / h) with sequence parallelism.
For a gated block in bfloat16 with RMS norms and k = r h it is 20h + 8 + 4 r h + 8f + 4n, which a
test verifies to the byte with torch's hooks. Selective recomputation keeps no scores, and full
recomputation keeps only the block's input. torchtitan's selective recomputation saves the outputs
of attention and of every other matmul (query, value, gate, down). With the block's input this is
e (2h + 2a + k + f) + 4n. All of it except the block's input is divided over tensor ranks.

In a mixture of experts f is the active width. A block with E experts, j of them per token, also
keeps, divided over tensor ranks with sequence parallelism:

    inputs of experts, a copy for each          i j h
    outputs of experts, before weighting        e j h, 0 if a fused gate applies the weights
    router: float32 probabilities and its map   5 E

These are the tokens that a device sends. It receives the same number if experts are loaded evenly.
The intermediate tensors of latent attention's projections are not counted.

A pipeline of p stages has up to p micro-batches in flight, so the first stage keeps as many block
activations as the whole model has blocks. Interleaving v parts per stage adds (p - 1) / (p v) of
them (Narayanan et al. 2021). The stages of Paceline's trainer have unequal numbers of blocks, so a
later stage may keep the most: r stages before the last, a stage keeps r + 1 micro-batches. The
number of micro-batches in the step limits all of these.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from paceline.accounting.counts import count_parameters, divide_into_stages
from paceline.core.specs import Experts, ModelShape
from paceline.predict.cost.layouts import CHECKPOINTING, Layouts, Workload


class StageLoads(NamedTuple):
    """Largest loads over the ranks of each pipeline, as arrays shaped like the layouts'."""

    parameters: Any
    """Parameters of the rank with the most, summed over tensor ranks."""
    in_flight: Any
    """Most blocks times micro-batches that a rank keeps. r ranks before the last, a rank keeps
    r + 1 micro-batches."""
    last: Any
    """Number of blocks of the last rank."""


def stage_loads(
    shape: ModelShape, context_length: int, pipeline: Any, interleave: Any
) -> StageLoads:
    """Returns the largest loads of the trainer's stages.

    A layout with more stages than the model has blocks cannot run. Its ranks and stages per rank
    are reduced until every stage has a block.
    """
    ranks, parts = np.broadcast_arrays(pipeline, interleave)
    pairs, places = np.unique(np.stack([ranks.ravel(), parts.ravel()]), axis=1, return_inverse=True)
    loads = np.array([_loads(shape, context_length, *map(int, pair)) for pair in pairs.T])
    return StageLoads(*(column[places].reshape(ranks.shape) for column in loads.T))


@functools.lru_cache(maxsize=4096)
def _loads(
    shape: ModelShape, context_length: int, num_ranks: int, interleave: int
) -> tuple[float, float, float]:
    num_ranks = min(num_ranks, shape.num_layers)
    interleave = min(interleave, shape.num_layers // num_ranks)
    stages = divide_into_stages(shape, context_length, num_ranks, interleave)
    blocks = [sum(map(len, stages[rank::num_ranks])) for rank in range(num_ranks)]
    counted = count_parameters(shape)
    first, head = counted.embedding + counted.positions, counted.head
    block = (counted.total - first - head) / shape.num_layers
    parameters = [number * block for number in blocks]
    parameters[0] += first
    # The last rank of a pipeline has its own copy of a tied embedding.
    is_copied = shape.tied_embeddings and num_ranks > 1
    parameters[-1] += counted.embedding if is_copied else head
    in_flight = max(number * (num_ranks - rank) for rank, number in enumerate(blocks))
    return max(parameters), float(in_flight), float(blocks[-1])


_FLOAT32_BYTES = 4


def block_bytes_per_token(
    layouts: Layouts, workload: Workload, *, checkpointing: Any = None
) -> Any:
    """Returns the bytes per token that a block keeps on one device.

    `checkpointing` overrides that of the layouts. 0 gives the memory of a block while it is
    recomputed.
    """
    chosen = layouts.checkpointing if checkpointing is None else checkpointing
    scores = np.where(chosen == CHECKPOINTING["none"], score_bytes(workload), 0)
    split, tensor = layouts.stream_split, layouts.tensor
    block_input = workload.compute_bytes * workload.shape.d_model / split
    everything = stream_bytes(workload) / split + matrix_bytes(workload) / tensor + scores / tensor
    if workload.experts is not None:
        everything = everything + routed_bytes(workload, workload.experts) / split
    if workload.framework_memory.selective == "odd matmuls":
        saved = odd_matmul_bytes(workload) / tensor
        everything = np.where(chosen == CHECKPOINTING["selective"], block_input + saved, everything)
    return np.where(chosen == CHECKPOINTING["full"], block_input, everything)


def odd_matmul_bytes(workload: Workload) -> Any:
    """Returns the output bytes per token of every other matmul and attention, over tensor ranks."""
    shape, size = workload.shape, workload.compute_bytes
    queries_and_output = 2 * shape.attention_width
    matmuls = shape.key_value_width + shape.d_ff + shape.d_model
    return size * (queries_and_output + matmuls) + _FLOAT32_BYTES * shape.num_heads


def stream_bytes(workload: Workload) -> int:
    """Returns the bytes per token that norms and residuals keep, summed over tensor ranks."""
    shape, size = workload.shape, workload.compute_bytes
    branches = 2 if shape.has_attention else 1
    num_norms = branches if shape.norm == "none" else shape.block_norms
    in_and_out = (size + _input_bytes(workload)) * shape.d_model
    norm = {
        "none": size * shape.d_model,
        "layernorm": in_and_out,
        "rmsnorm": in_and_out + _FLOAT32_BYTES
        if workload.framework_memory.fused
        else (_FLOAT32_BYTES + 2 * size) * shape.d_model + _FLOAT32_BYTES,
    }[shape.norm]
    return num_norms * norm + (branches * shape.d_model if workload.dropout else 0)


def matrix_bytes(workload: Workload) -> int:
    """Returns the bytes per token that attention and feed-forward keep, without scores."""
    shape, size = workload.shape, workload.compute_bytes
    heads = 2 * size * (shape.attention_width + shape.key_value_width)
    sums = _FLOAT32_BYTES * shape.num_heads if workload.attention == "flash" else 0
    product = _input_bytes(workload)
    gated = 2 if workload.framework_memory.fused else 3
    before = {"swiglu": gated, "gelu": 1, "linear": 0}[shape.feed_forward]
    # Attention's backward also needs its output in the compute dtype.
    again = product * shape.attention_width if product < size else 0
    return heads + sums + again + (before * size + product) * shape.d_ff


def routed_bytes(workload: Workload, experts: Experts) -> Any:
    """Returns the bytes per token that expert routing keeps, averaged over all blocks."""
    copies = experts.experts_per_token * workload.shape.d_model
    weighted = 0 if workload.framework_memory.fused else workload.compute_bytes
    router = (_FLOAT32_BYTES + 1) * experts.num_experts
    share = 1 - experts.num_dense_layers / workload.shape.num_layers
    return share * ((_input_bytes(workload) + weighted) * copies + router)


def _input_bytes(workload: Workload) -> int:
    """Returns the bytes per element of a kept matmul input."""
    return 1 if workload.framework_memory.float8_inputs else workload.compute_bytes


def score_bytes(workload: Workload) -> int:
    """Returns the bytes per token of stored attention scores; 0 for flash attention."""
    if workload.attention == "flash":
        return 0
    size = workload.compute_bytes
    per_score = 2 * size + 1 if workload.dropout else size
    return per_score * workload.shape.num_heads * workload.context_length


def blocks_in_flight(layouts: Layouts, workload: Workload) -> tuple[Any, Any]:
    """Returns the maximum number of block activations that the first and the last stage keep.

    The last stage keeps one micro-batch of its own blocks. With interleaving it also keeps those of
    its earlier parts, which later micro-batches pass before the last part's first backward:
    (v - 1) p + 1 parts of L / (p v) blocks.
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
    """Returns the largest loads over the ranks of the trainer's pipelines."""
    return stage_loads(
        workload.shape, workload.context_length, layouts.pipeline, layouts.pipeline_interleave
    )


def kept_activations(layouts: Layouts, workload: Workload) -> Any:
    """Returns the bytes that the first stage keeps for backward at its peak."""
    tokens = workload.tokens / layouts.context
    return (
        block_bytes_per_token(layouts, workload) * tokens * blocks_in_flight(layouts, workload)[0]
    )


def recomputed_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns the extra bytes of one block while it is recomputed; 0 without recomputation."""
    again = block_bytes_per_token(layouts, workload, checkpointing=CHECKPOINTING["none"])
    more = again - block_bytes_per_token(layouts, workload)
    return more * workload.tokens / layouts.context


def whole_sequence_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns the bytes of full-sequence tensors in a block under sequence parallelism."""
    one = workload.compute_bytes * workload.shape.d_model * workload.tokens / layouts.context
    is_split = layouts.sequence_parallel & (np.asarray(layouts.tensor) > 1)
    return np.where(is_split, workload.framework_memory.whole_sequences * one, 0.0)


def logit_bytes(layouts: Layouts, workload: Workload) -> Any:
    """Returns the bytes of the loss, at the framework's bytes per logit."""
    tokens = workload.tokens / layouts.context
    per_logit = workload.framework_memory.logit_bytes
    return per_logit * tokens * workload.shape.vocab_size / layouts.tensor
