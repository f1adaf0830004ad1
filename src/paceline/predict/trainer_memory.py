"""Peak memory of a step of Paceline's trainer under a layout, on the rank that uses the most.

`paceline.predict.cost.memory` estimates any framework for millions of layouts at once. This
module models one step of Paceline's trainer, run by torch's FSDP2 and pipeline schedules on a CPU,
where every collective has finished when its call returns.
`paceline.accounting.counts` assigns blocks to stages. T is the tokens of a micro-batch on a rank, t
the tensor ranks, c the context ranks, S the ranks that states are sharded over. u is the bytes of a
block, the unit that FSDP2 gathers or averages at once. The rest of a stage is another unit, the
root.

    always            parameters and both AdamW moments, sharded over S; the rotary position tables
    gathered          FSDP2 computes with a copy of the parameters, even of unsharded ones.
                      replicate and ZeRO-2 hold the copy of each block from forward until the end
                      of its backward, ZeRO-3 of one block at a time. The root's copy stays for the
                      whole pass
    all-gather        its result coexists with the copy made from it. In forward the result stays
                      until the next one is copied; in backward the next block is prefetched. While
                      gloo gathers, it holds a buffer of the same size
    gradients         unsharded until a block's backward ends in the last micro-batch, then 1 / S;
                      with one micro-batch only the current block's gradients are unsharded
    embedding         its gradient has the full vocabulary on every tensor rank until it is reduced
    reduce-scatter    its input, u, is kept until the next block is averaged; with replicas as well
    pipeline          nothing is averaged or resharded before the last micro-batch has finished
    kept by a block   4 T (6 h + (3 a + 2 c k + 4 f) / t): two norms keep their input, scaled input
                      and output. Attention keeps its queries, the keys and values of all context
                      ranks, and its output twice, since heads are concatenated for the output
                      projection. The gated layer keeps four tensors. With sequence parallelism
                      norms keep 4 h / t, and their gathered outputs 2 h
    recomputation     a block keeps its input only, and everything else again during its backward
    bfloat16          autocast: weights, gradients, residual stream and norms stay in float32. A
                      norm's output is copied for every matrix that reads it, three before attention
                      and two before feed-forward. These copies, everything else that a block keeps,
                      and copies of its matrices take half. With recomputation, autocast itself
                      holds the copies of matrices until forward is over
    stage's output    kept for each micro-batch in flight
    messages sent     of a rank with several stages: torch's schedule waits for them when all
                      micro-batches are over, and keeps outputs and inputs' gradients until then
    receive buffers   of a pipeline, on accelerators: every stage has memory for the input and for
                      the gradient of the output of all micro-batches, from the first step on. On a
                      CPU they are as large, but not among what is measured: what a step allocates

The peak is the largest sum over these moments: before the last block is gathered; at the head; at
the loss (three tensors the size of the logits); at the backward of head and final norm (six tensors
the size of the residual stream); in a block's backward when the next block is gathered, when the
feed-forward layer's hidden gradients exist, and when all of the block's weight gradients exist; and
at the embedding. Memory changes linearly between the second block that runs backward and the last
but one, after which nothing is prefetched, so only the first two and the last two are evaluated.
With ZeRO-3 on a busy machine, gloo threads may release an all-gather's result and buffer only after
the next ones are allocated. These up to two extra blocks are not modelled.

On accelerators, norms do not keep their scaled inputs, and gathering needs no buffer of gloo's. A
layout of shards and replicas alone, without other axes, is then followed pass by pass instead: see
`paceline.accounting.memory.strategy_buffers`.

A pipeline follows torch's schedules. On rank r of p ranks with v stages each, the warm-up is
p - 1 - r forwards, or (v - 1) p + 2 (p - 1 - r) if ranks have several stages. Then forwards and
backwards alternate until only backwards remain. Micro-batches go through a rank's stages in groups
of p, forward from the first stage and backward from the last.
"""

import dataclasses
from collections.abc import Iterator

from paceline.accounting.counts import count_parameters, divide_into_stages
from paceline.accounting.memory.passes import peak_of_sharded_passes
from paceline.accounting.memory.step import MemoryParts
from paceline.core.plan import ParallelLayout
from paceline.core.specs import BatchShape, ModelShape, Precision, bytes_per_element


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """Backward pass of one micro-batch through one stage of a rank."""

    stage: int
    """Index among the rank's stages, from 0."""
    in_flight: tuple[int, ...]
    """Micro-batches that each of the rank's stages keeps for backward, including this one."""
    finished: tuple[int, ...]
    """Micro-batches whose backward pass through each of the rank's stages is over."""


def backward_passes(
    layout: ParallelLayout, rank: int, num_micro_batches: int
) -> Iterator[BackwardPass]:
    """Yields the backward passes of one step in order."""
    ranks, parts = layout.pipeline, layout.pipeline_interleave
    num_passes = num_micro_batches * parts
    later = ranks - 1 - rank
    ahead = later if parts == 1 else (parts - 1) * ranks + 2 * later
    in_flight = [0] * parts
    finished = [0] * parts
    forwards = 0
    for number in range(num_passes):
        while forwards < min(num_passes, number + ahead + 1):
            in_flight[forwards // ranks % parts] += 1
            forwards += 1
        stage = parts - 1 - number // ranks % parts
        yield BackwardPass(stage=stage, in_flight=tuple(in_flight), finished=tuple(finished))
        in_flight[stage] -= 1
        finished[stage] += 1


_BYTES = 4
_MATRICES_AFTER_NORMS = 5
"""Query, key, value; gate and up."""
_MOMENTS = 2
"""Values that AdamW keeps for each parameter."""


_FLOAT32 = Precision()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes of each kind of tensor on one rank, after division over tensor and context ranks."""

    block: float
    """All weights of a block."""
    embedding: float
    head: float
    matrix: float
    """One weight matrix of the feed-forward layer."""
    kept: float
    """Activations of one micro-batch that a block keeps for backward."""
    cached: float
    """Copies of a block's matrices that only autocast holds, until forward is over."""
    recomputed: float
    """Activations that a block computes again during its backward; 0 without recomputation."""
    stream: float
    hidden: float
    """One hidden tensor of the feed-forward layer."""
    logits: float
    tables: float
    """Sines and cosines of all positions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stage:
    """Consecutive blocks, with the embedding or the head at the ends of the model."""

    num_blocks: int
    root: float
    """Bytes of all weights outside blocks."""
    head: float
    """Bytes of the head; 0 if it is in another stage."""
    root_gradient: float
    embedding_gradient: float
    """Bytes of the embedding's gradient; 0 if it is in another stage."""

    def parameters(self, block: float) -> float:
        return self.root + self.num_blocks * block

    def gradients(self, block: float) -> float:
        return self.root_gradient + self.num_blocks * block


def trainer_memory(
    layout: ParallelLayout,
    shape: ModelShape,
    batch: BatchShape,
    precision: Precision = _FLOAT32,
    *,
    on_accelerator: bool = False,
) -> MemoryParts:
    """Returns the peak memory of a step on the rank that uses the most, by part.

    Gradients are those that the optimizer updates with; at the peak, activations may still have
    their place. On accelerators, other kernels compute than on CPUs.
    """
    sizes = _sizes(layout, shape, batch, precision, on_accelerator=on_accelerator)
    is_sharded_only = layout.sharding != "none" and layout.world_size == layout.data_parallel
    if on_accelerator and is_sharded_only:
        return _of_passes(layout, shape, batch, precision, sizes)
    ranks = []
    for rank in range(layout.pipeline):
        stages = _stages(layout, shape, batch, sizes, rank)
        held = _Rank(layout, sizes, stages, rank, on_accelerator=on_accelerator)
        if on_accelerator:
            held.receive_into_buffers(batch.accumulation_steps)
        ranks.append(held.memory(rank, batch.accumulation_steps))
    return max(ranks, key=lambda parts: parts.total)


def _of_passes(
    layout: ParallelLayout,
    shape: ModelShape,
    batch: BatchShape,
    precision: Precision,
    sizes: _Sizes,
) -> MemoryParts:
    """Returns the memory of shards, and perhaps replicas of them, without gloo's buffers."""
    checkpointing = "full" if layout.activation_checkpointing == "full" else "none"
    reshards = layout.sharding == "parameters"
    peak = peak_of_sharded_passes(shape, batch, checkpointing, precision, layout.shard, reshards)
    own = round(_BYTES * count_parameters(shape).total / layout.shard)
    return MemoryParts(
        parameters=own,
        gradients=own,
        optimizer_state=_MOMENTS * own,
        buffers=round(sizes.tables),
        activations=max(peak - own, 0),
    )


def _sizes(
    layout: ParallelLayout,
    shape: ModelShape,
    batch: BatchShape,
    precision: Precision,
    *,
    on_accelerator: bool,
) -> _Sizes:
    tensor = layout.tensor
    counted = count_parameters(shape)
    matrices = (counted.attention + counted.feed_forward) / shape.num_layers
    tokens = batch.tokens_per_pass / layout.context
    numbers = _BYTES * tokens
    split = tensor if layout.sequence_parallel else 1
    stream = numbers * shape.d_model / split
    # On an accelerator, norms do not keep their scaled inputs.
    norms = (2 if on_accelerator else 4) * stream
    keys = 2 * layout.context * shape.key_value_width
    divided = (3 * shape.attention_width + keys + 4 * shape.d_ff) / tensor
    low = _BYTES if precision == _FLOAT32 else bytes_per_element(precision.compute)
    copies = 0.0
    if precision == _FLOAT32:
        read = 2 * _BYTES * tokens * shape.d_model
        activations = norms + read + _BYTES * tokens * divided
    else:
        read = _MATRICES_AFTER_NORMS * low * tokens * shape.d_model
        copies = low * matrices / tensor
        activations = norms + read + low * tokens * divided + copies
    recomputes = layout.activation_checkpointing == "full"
    return _Sizes(
        block=_BYTES * (matrices / tensor + 2 * shape.d_model),
        embedding=_BYTES * counted.embedding / tensor,
        head=_BYTES * shape.vocab_size * shape.d_model / tensor,
        matrix=_BYTES * shape.d_model * shape.d_ff / tensor,
        kept=stream if recomputes else activations,
        cached=copies if recomputes else 0.0,
        # Its input is kept already.
        recomputed=activations - stream if recomputes else 0.0,
        stream=stream,
        hidden=low * tokens * shape.d_ff / tensor,
        logits=numbers * shape.vocab_size / tensor,
        tables=_BYTES * shape.max_context_length * shape.head_width,
    )


def _stages(
    layout: ParallelLayout, shape: ModelShape, batch: BatchShape, sizes: _Sizes, rank: int
) -> list[_Stage]:
    """Returns the stages of one pipeline rank."""
    divided = divide_into_stages(
        shape, batch.context_length, layout.pipeline, layout.pipeline_interleave
    )
    stages = []
    for blocks in divided[rank :: layout.pipeline]:
        has_embedding, has_head = blocks[0] == 0, blocks[-1] == shape.num_layers - 1
        is_shared = shape.tied_embeddings and has_embedding
        embedding = sizes.embedding if has_embedding else 0.0
        head = sizes.head if has_head else 0.0
        own_head = 0.0 if is_shared else head
        stage = _Stage(
            num_blocks=len(blocks),
            root=embedding + own_head,
            head=head,
            root_gradient=embedding * layout.tensor + own_head,
            embedding_gradient=embedding * layout.tensor,
        )
        stages.append(stage)
    return stages


class _Rank:
    """One rank of a pipeline, or of a layout without one."""

    def __init__(
        self,
        layout: ParallelLayout,
        sizes: _Sizes,
        stages: list[_Stage],
        rank: int,
        *,
        on_accelerator: bool = False,
    ) -> None:
        self._on_accelerator = on_accelerator
        self._layout = layout
        self._sizes = sizes
        self._stages = stages
        sharded = layout.sharding != "none"
        self._shards = layout.shard * layout.context if sharded else 1
        self._is_wrapped = layout.data_parallel * layout.context > 1
        self._reshards = layout.sharding == "parameters" and self._shards > 1
        self._is_pipeline = layout.pipeline > 1
        self._buffer = sizes.block if self._shards > 1 else 0.0
        self._whole = sum(stage.parameters(sizes.block) for stage in stages)
        last = layout.pipeline * layout.pipeline_interleave - 1
        numbers = [rank + own * layout.pipeline for own in range(len(stages))]
        self._before = [sizes.stream * (number > 0) for number in numbers]
        self._after = [sizes.stream * (number < last) for number in numbers]
        self._received = 0.0
        self._receives = [0.0] * len(stages)

    def receive_into_buffers(self, num_micro_batches: int) -> None:
        """Counts the memory that stages receive into, one tensor per micro-batch and neighbour."""
        # A micro-batch in flight keeps what its stage has received, which counts once.
        self._receives = self._before
        self._received = num_micro_batches * (sum(self._before) + sum(self._after))

    def memory(self, rank: int, num_micro_batches: int) -> MemoryParts:
        own = self._whole / self._shards
        passes = backward_passes(self._layout, rank, num_micro_batches)
        moments = [moment for each in passes for moment in self._moments(each)]
        return MemoryParts(
            parameters=round(own),
            gradients=round(own),
            optimizer_state=round(_MOMENTS * own),
            buffers=round(self._sizes.tables + self._received),
            activations=round(max(*moments, own) - own),
        )

    def _moments(self, each: BackwardPass) -> Iterator[float]:
        """Yields the memory in use besides the states, at each moment that may be the peak."""
        sizes, stage = self._sizes, self._stages[each.stage]
        others = [s for number, s in enumerate(self._stages) if number != each.stage]
        beside = sum(
            s.gradients(sizes.block)
            for number, s in enumerate(self._stages)
            if number != each.stage and each.finished[number]
        )
        if self._is_wrapped and not self._reshards:
            beside += sum(other.parameters(sizes.block) for other in others)
        in_flight = zip(each.in_flight, self._stages, strict=True)
        beside += sizes.kept * sum(number * s.num_blocks for number, s in in_flight)
        received = zip(each.in_flight, self._receives, strict=True)
        beside -= sum(number * size for number, size in received)
        if self._is_pipeline:
            beside += sizes.stream * sum(each.in_flight)
        if len(self._stages) > 1:
            sent = zip(each.finished, self._before, self._after, strict=True)
            beside += sum(number * (before + after) for number, before, after in sent)
        is_first = not each.finished[each.stage]
        for moment in (*self._forward(stage, is_first), *self._backward(stage, is_first)):
            yield beside + moment

    def _forward(self, stage: _Stage, is_first: bool) -> Iterator[float]:
        """Yields memory from the last block until backward starts, without kept activations."""
        sizes = self._sizes
        accumulated = 0.0 if is_first else stage.gradients(sizes.block)
        gathered = self._gathered(stage, stage.num_blocks)
        # A pipeline gathers blocks in the first micro-batch, when little other memory is in use.
        buffer = 0.0 if self._is_pipeline else self._buffer
        if buffer:
            own = 0.0 if self._reshards else sizes.block
            cached = (stage.num_blocks - 1) * sizes.cached
            yield accumulated + gathered - own + 3 * buffer - sizes.kept + sizes.stream + cached
        if stage.head:
            cached = stage.num_blocks * sizes.cached
            yield accumulated + gathered + buffer + 3 * sizes.stream + sizes.logits + cached
            # torch's loss of split logits returns a product of a sum of two.
            num_logits = 4 if self._layout.tensor > 1 else 3
            yield accumulated + gathered + 3 * sizes.stream + num_logits * sizes.logits
            yield accumulated + gathered + stage.head + 4 * sizes.stream + sizes.logits
            yield (accumulated or stage.head) + gathered + 6 * sizes.stream

    def _gathered(self, stage: _Stage, num_blocks: int) -> float:
        """Returns the bytes of FSDP2's gathered copy of `num_blocks` blocks and the root."""
        if not self._is_wrapped:
            return 0.0
        return stage.root + (0.0 if self._reshards else num_blocks * self._sizes.block)

    def _backward(self, stage: _Stage, is_first: bool) -> Iterator[float]:
        """Yields memory during the first two blocks that run backward, and the last two."""
        sizes, blocks = self._sizes, stage.num_blocks
        for done in sorted({0, min(1, blocks - 1), max(0, blocks - 2), blocks - 1}):
            there = self._while_block_runs(stage, done, is_first) - done * sizes.kept
            there += sizes.recomputed
            prefetched = self._buffer if self._reshards and done < blocks - 1 else 0.0
            yield there + prefetched * (1 if self._on_accelerator else 2)
            there += prefetched
            if is_first:
                yield there + sizes.stream + 2 * sizes.hidden + sizes.matrix
                freed = sizes.kept + sizes.recomputed
                yield there - freed + 6 * sizes.stream + sizes.block
            else:
                yield there + sizes.stream + sizes.hidden + max(sizes.hidden, sizes.matrix)
        # The embedding is last. Its gradient is added to that of earlier micro-batches.
        added = 0.0 if is_first else stage.embedding_gradient
        yield self._while_root_runs(stage) + added - blocks * sizes.kept

    def _while_block_runs(self, stage: _Stage, done: int, is_first: bool) -> float:
        """Returns parameter and gradient bytes in a block's backward, after `done` blocks."""
        block, left = self._sizes.block, stage.num_blocks - done
        if not self._is_wrapped or self._is_pipeline:
            gradients = stage.head + done * block if is_first else stage.gradients(block)
            gathered = self._gathered(stage, stage.num_blocks)
            # In a pipeline, ZeRO-3 keeps the blocks that backward has gathered.
            return gradients + gathered + (block * (done + 1) if self._reshards else 0.0)
        gradients = stage.head if is_first else stage.root_gradient + left * block
        gathered = self._gathered(stage, left) + (block if self._reshards else 0.0)
        averaged = done * block / self._shards + (block if done else 0.0)
        return gradients + gathered + averaged

    def _while_root_runs(self, stage: _Stage) -> float:
        """Returns parameter and gradient bytes once all blocks of a stage have run backward."""
        block, blocks = self._sizes.block, stage.num_blocks
        if not self._is_wrapped:
            return stage.gradients(block)
        if self._is_pipeline:
            return stage.gradients(block) + stage.parameters(block)
        averaged = blocks * block / self._shards + block
        return stage.root + stage.root_gradient + averaged
