"""Tensor parallelism: each matrix of a block split over the tensor ranks.

Query, key, value, gate and up are split by columns, so every rank has whole heads and whole
channels of the feed-forward layer. Output and down are split by rows, and their output is the sum
of the ranks' results (Shoeybi et al. 2019). Embedding and output layer are split over the
vocabulary: logits stay split, and `summed_loss` computes the loss from them.

    without sequence parallelism   every rank has the whole residual stream; the sum after output
                                   and down is an all-reduce
    with it                        every rank has its part of the sequence of the residual stream
                                   and of the norms; the sum is a reduce-scatter, and the input of
                                   attention and feed-forward is all-gathered (Korthikanti 2022)

All parameters become DTensors on the tensor mesh, those of norms replicated, so optimizers and
clipping handle only one kind of tensor.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from paceline.parallel.dtensor import whole_tensor

_SEQUENCE = 1
"""The dimension of tokens in (batch, sequence, width)."""


class _Replicated(ParallelStyle):
    """A module with replicated parameters and replicated inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Return values of hooks replace inputs and output; torch's annotations do not reflect that.
        wrap: Any = self._wrap_input
        unwrap: Any = self._unwrap_output
        return distribute_module(module, device_mesh, input_fn=wrap, output_fn=unwrap)

    @staticmethod
    def _wrap_input(
        _module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh
    ) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

    @staticmethod
    def _unwrap_output(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Tensor:
        return output.to_local()


def apply_tensor_parallelism(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool
) -> None:
    """Splits the matrices of a model or pipeline stage in place.

    The model has `blocks` like those of `TransformerLM`, and an `embedding`, a `final_norm` and a
    `head`, or None in their places. All ranks of the mesh must have the same weights.
    """
    stream: Placement = Shard(_SEQUENCE) if sequence_parallel else Replicate()
    for block in model.get_submodule("blocks").children():
        _parallelize(block, mesh, _block_plan(stream, sequence_parallel))
    embedding: Any = getattr(model, "embedding", None)
    head: Any = getattr(model, "head", None)
    is_tied = embedding is not None and head is not None and head.weight is embedding.weight
    if embedding is not None:
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        _parallelize(embedding, mesh, rows)
    if head is not None:
        _parallelize(model.get_submodule("final_norm"), mesh, _norm(sequence_parallel))
        columns = ColwiseParallel(input_layouts=stream, use_local_output=False)
        _parallelize(head, mesh, columns)
        if is_tied:
            head.weight = embedding.weight


def _block_plan(stream: Placement, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Returns the parallel style of each layer of a block."""
    plan: dict[str, ParallelStyle] = {
        "attention_norm": _norm(sequence_parallel),
        "feed_forward_norm": _norm(sequence_parallel),
        "attention.output": RowwiseParallel(output_layouts=stream),
        "feed_forward.down": RowwiseParallel(output_layouts=stream),
    }
    by_columns = ("attention.query", "attention.key", "attention.value")
    for name in (*by_columns, "feed_forward.gate", "feed_forward.up"):
        plan[name] = ColwiseParallel()
    # Gathers the input once for all layers that read it, and reduces its gradient once.
    plan["attention"] = PrepareModuleInput(
        input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
    )
    plan["feed_forward"] = PrepareModuleInput(
        input_layouts=(stream,), desired_input_layouts=(Replicate(),)
    )
    return plan


def _norm(sequence_parallel: bool) -> ParallelStyle:
    return SequenceParallel() if sequence_parallel else _Replicated()


def _parallelize(
    module: nn.Module, mesh: DeviceMesh, plan: ParallelStyle | dict[str, ParallelStyle]
) -> None:
    # Every rank has all weights, so each takes its part locally, without a broadcast.
    parallelize_module(module, mesh, plan, src_data_rank=None)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy in float32, summed over this rank's tokens.

    Logits are (batch, sequence, vocabulary), a DTensor if tensor ranks split the vocabulary.
    """
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return whole_tensor(loss)


@contextlib.contextmanager
def vocabulary_parallel(is_split: bool) -> Iterator[None]:
    """Computes the loss of split logits, and its gradient, without gathering the logits.

    Forward and backward must both run inside the context.
    """
    with loss_parallel() if is_split else contextlib.nullcontext():
        yield
