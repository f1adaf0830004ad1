"""Pipeline parallelism: stages of a model on different ranks, with torch's pipeline schedules.

A batch is divided into m micro-batches. Phases of a step, on every rank of a pipeline:

1. The schedule runs forward and backward of each micro-batch on each of the rank's stages, as soon
   as the inputs have arrived from the neighbouring stages. 1F1B keeps at most one micro-batch in
   flight per stage from its own to the last; interleaved 1F1B has v stages on each rank, which
   divides the bubble by v.
2. The wrapper of the stage modules averages gradients over data-parallel ranks with the last
   micro-batch.
3. An embedding tied to the head has copies on two ranks: the ranks exchange their gradients, and
   both compute the same sum, so both copies stay bitwise equal.
4. The last stage broadcasts the loss to all ranks of the pipeline.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from paceline.core.errors import UsageError
from paceline.core.ranges import PipelineRange
from paceline.devices.named_range import named_range
from paceline.parallel.dtensor import complete_gradient, local_tensor, whole_tensor

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps a micro-batch's output and targets to the loss."""
Context = Callable[[], contextlib.AbstractContextManager[object]]


_MOST_SHAPES = 4
"""Number of batch shapes for which buffers are kept: passes of held-out sequences may differ by
one, and the sampler has another shape."""


class _Evaluation(NamedTuple):
    stages: list[Any]
    schedule: ScheduleLoopedBFS


class Pipeline:
    """The stages of one rank, and the schedule that runs them with those of the other ranks.

    Rank r of p has the stages r, r + p, ... `paceline.core.runnable` defines which numbers of
    micro-batches a layout supports. The loss of a step is the sum of the micro-batches' losses.
    `forward_context`, such as autocast, applies to forward, not to backward or the loss. `tied` is
    this rank's copy of the weight that the first and the last stage share.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        num_stages: int,
        num_micro_batches: int,
        loss: Loss,
        group: dist.ProcessGroup,
        device: torch.device,
        forward_context: Context = contextlib.nullcontext,
        tied: nn.Parameter | None = None,
    ) -> None:
        self.stages = dict(sorted(stages.items()))
        """This rank's stages by number."""
        self.tied = tied
        self._num_stages = num_stages
        self._num_micro_batches = num_micro_batches
        self._loss = loss
        self._group = group
        self._device = device
        self._forward_context = forward_context
        self._last_rank = (num_stages - 1) % dist.get_world_size(group)
        self._training = self._make_training_schedule()
        self._evaluating: dict[tuple[int, torch.Size], _Evaluation] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank reads the tokens."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self._num_stages - 1 in self.stages

    def forward_and_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Computes averaged gradients on all ranks; returns the loss of the batch on all ranks.

        All ranks of the pipeline pass the same batch.
        """
        self._require_even(tokens, self._num_micro_batches)
        loss = self._run(self._training.step, tokens, targets)
        self._require_gradients()
        self._add_tied_gradients()
        return loss

    def evaluate(self, tokens: Tensor, targets: Tensor, num_micro_batches: int = 1) -> Tensor:
        """Returns the loss of a batch on all ranks, and keeps no activations.

        All ranks of the pipeline pass the same batch, of any size.
        """
        self._require_even(tokens, num_micro_batches)
        evaluation = self._evaluation(tokens, num_micro_batches)
        with torch.no_grad():
            loss = self._run(evaluation.schedule.eval, tokens, targets)
        for stage in evaluation.stages:
            stage.clear_runtime_states()  # Frees the activations of all micro-batches.
        return loss

    def logits(self, tokens: Tensor, vocab_size: int) -> Tensor:
        """Returns the logits of a batch on all ranks.

        All ranks of the pipeline pass the same batch.
        """
        evaluation = self._evaluation(tokens, 1)
        arguments = (tokens,) if self.is_first else ()
        with torch.no_grad():
            # The schedule has a loss function, so it requires targets; their values do not matter.
            expected = tokens if self.is_last else None
            output = evaluation.schedule.eval(*arguments, target=expected, losses=[])
        logits = torch.empty((*tokens.shape, vocab_size), device=self._device)
        if self.is_last:
            logits.copy_(whole_tensor(output))
        for stage in evaluation.stages:
            stage.clear_runtime_states()
        dist.broadcast(logits, group=self._group, group_src=self._last_rank)
        return logits

    def _evaluation(self, tokens: Tensor, num_micro_batches: int) -> _Evaluation:
        """Returns stages and schedule for batches of this shape."""
        key = (num_micro_batches, tokens.shape)
        if key not in self._evaluating:
            # Buffers fit only the shape of micro-batches for which they were created.
            if len(self._evaluating) == _MOST_SHAPES:
                self._evaluating.clear()
            stages = self._make_stages()
            schedule = ScheduleLoopedBFS(
                stages, num_micro_batches, self._marked_loss, scale_grads=False
            )
            self._evaluating[key] = _Evaluation(stages, schedule)
        return self._evaluating[key]

    def _run(self, run: Callable[..., Any], tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        arguments = (tokens,) if self.is_first else ()
        expected = targets if self.is_last else None
        run(*arguments, target=expected, losses=losses, return_outputs=False)
        total = torch.zeros((), device=self._device)
        if self.is_last:
            total = torch.stack([loss.detach() for loss in losses]).sum()
        dist.broadcast(total, group=self._group, group_src=self._last_rank)
        return total

    def _make_training_schedule(self) -> Any:
        stages = self._make_stages()
        options: dict[str, Any] = {"loss_fn": self._marked_loss, "scale_grads": False}
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(stages, self._num_micro_batches, **options)
        return Schedule1F1B(stages[0], self._num_micro_batches, **options)

    def _make_stages(self) -> list[Any]:
        return [
            _MarkedStage(
                module,
                number,
                self._num_stages,
                self._device,
                group=self._group,
                forward_context=self._forward_context,
            )
            for number, module in self.stages.items()
        ]

    def _marked_loss(self, output: Tensor, targets: Tensor) -> Tensor:
        with named_range(PipelineRange("loss", self._num_stages - 1, None).name):
            return self._loss(output, targets)

    def _require_even(self, tokens: Tensor, num_micro_batches: int) -> None:
        if len(tokens) % num_micro_batches:
            raise UsageError(
                f"a batch of {len(tokens)} sequences cannot be split into {num_micro_batches} "
                "equal micro-batches, as a pipeline needs them; change the batch size or the "
                "number of micro-batches"
            )

    def _require_gradients(self) -> None:
        """Raises if a trained parameter has no gradient."""
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters():
                if parameter.requires_grad and parameter.grad is None:
                    raise UsageError(
                        f"the pipeline schedule left {name} without a gradient; every parameter "
                        "of a stage must contribute to its output"
                    )

    def _add_tied_gradients(self) -> None:
        if self.tied is None or self.is_first == self.is_last:
            return
        complete_gradient(self.tied)
        gradient = self.tied.grad
        assert gradient is not None
        own = local_tensor(gradient)
        others = torch.empty_like(own)
        peer = self._last_rank if self.is_first else 0
        exchange = [
            dist.P2POp(dist.isend, own.clone(), group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, others, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        own.add_(others)


class _MarkedStage(PipelineStage):
    """A stage whose compute appears in traces per micro-batch, excluding waits."""

    def __init__(self, *arguments: Any, forward_context: Context, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._forward_context = forward_context

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        with named_range(PipelineRange("forward", self.stage_index, fwd_chunk_id).name):
            output = super().forward_one_chunk(fwd_chunk_id, *arguments, **keywords)
        if self.is_last and not torch.is_grad_enabled():
            # Backward does not need them, and logits of all micro-batches would accumulate.
            del self.fwd_cache[fwd_chunk_id]
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        with named_range(PipelineRange("backward", self.stage_index, bwd_chunk_id).name):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **keywords)

    def forward_maybe_with_nosync(self, *arguments: Any, **keywords: Any) -> Any:
        with self._forward_context():
            return super().forward_maybe_with_nosync(  # type: ignore[no-untyped-call]
                *arguments, **keywords
            )

    def _compute_outputs(self, *arguments: Any, **keywords: Any) -> Any:
        with self._forward_context():
            return super()._compute_outputs(*arguments, **keywords)
