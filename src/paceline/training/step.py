"""One training step: micro-batches, one average over ranks, one decision, one update.

Phases on every rank:

1. The rank's sequences go through the model in micro-batches. Each loss is scaled so that the
   average over ranks is the mean over all tokens of the batch, even if some ranks have more.
2. Gradients are averaged in the last micro-batch; earlier micro-batches only accumulate them.
3. One all-reduce sums everything that ranks must agree on: the loss, whether to stop, and the notes
   of the run's guard. From these sums, all ranks decide identically whether to apply the update.
4. The optimizers step, on all ranks or on none.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.data.audit import DIGEST_PARTS, join_digest, split_digest
from paceline.parallel.mesh.tensor import summed_loss, vocabulary_parallel
from paceline.parallel.ranks.heartbeats import Phase, beat
from paceline.parallel.strategies import clip_grad_norm, without_synchronization
from paceline.training.config import StepConfig
from paceline.training.data_shard import BatchShare, micro_batches
from paceline.training.parallelize import LaidOut, autocast


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step, identical on all ranks."""

    loss: float
    """Mean over all tokens of the global batch, before the update."""
    gradient_norm: float
    """Norm of the averaged gradients, before clipping."""
    stop: bool
    """Whether any rank was asked to stop."""
    digest: int
    """Digest of the sequences of all ranks."""
    notes: tuple[float, ...] = ()
    """Notes of the ranks' guards, summed over ranks."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class Guard(Protocol):
    """Decides whether a step's update is applied, identically on all ranks."""

    def notes(self) -> Sequence[float]:
        """Returns this rank's numbers for the all-reduce, equally many on all ranks."""

    def accepts(self, result: StepResult) -> bool:
        """Returns whether to apply the update; all ranks decide from the same result."""


class FiniteGuard:
    """Accepts every step with a finite loss and finite gradients."""

    def notes(self) -> Sequence[float]:
        """Returns no notes."""
        return ()

    def accepts(self, result: StepResult) -> bool:
        """Returns whether loss and gradient norm are finite."""
        return result.is_finite


class TrainingStep:
    """Runs training steps of one model on this rank.

    Args:
        config: Micro-batch size, precision and clipping.
        model: The model, wrapped by a strategy.
        optimizers: Optimizers of its parameters.
        device: Device to compute on.
        guard: Decides which updates are applied; by default all finite ones.
        share: This rank's share of a batch; by default that of a data-parallel rank.
        laid_out: The mesh that the model is on, if any.
    """

    def __init__(
        self,
        config: StepConfig,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        guard: Guard | None = None,
        *,
        share: BatchShare | None = None,
        laid_out: LaidOut | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._optimizers = optimizers
        self._device = device
        self._guard = FiniteGuard() if guard is None else guard
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._share = share or BatchShare.of_data_parallel(rank, world_size)
        self._laid_out = laid_out
        # torch's DDP records its static graph in the first pass, which must average gradients.
        self._has_learned = not isinstance(model, DistributedDataParallel)

    def run(
        self, tokens: Tensor, targets: Tensor, *, stop: bool = False, digest: int = 0
    ) -> StepResult:
        """Trains on this rank's sequences of a global batch.

        Args:
            tokens: Input tokens.
            targets: Next token of each position.
            stop: Whether this rank was asked to stop; the result tells all ranks.
            digest: Digest of this rank's sequences.
        """
        loss = self.forward_and_backward(tokens, targets)
        read = digest if self._share.counts_data else 0
        noted = [float(stop), *split_digest(read), *self._guard.notes()]
        beat(Phase.ALL_REDUCE)
        # With an infinite maximum norm, torch measures the norm without clipping.
        norm = self._clip(self._config.clip_norm or math.inf)
        host = torch.tensor(noted, dtype=torch.float64)
        counted = loss.double() * self._share.loss_weight
        sums = torch.cat([counted.view(1), host.to(loss.device)])
        dist.all_reduce(sums)
        # The only device-to-host synchronization of a step.
        total, num_stops, *rest, gradient_norm = torch.cat([sums, norm.to(sums).view(1)]).tolist()
        result = StepResult(
            loss=total,
            gradient_norm=gradient_norm,
            stop=num_stops > 0,
            digest=join_digest(rest[:DIGEST_PARTS]),
            notes=tuple(rest[DIGEST_PARTS:]),
        )
        beat(Phase.UPDATE)
        if self._guard.accepts(result):
            for optimizer in self._optimizers:
                optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        return result

    def forward_and_backward(
        self, tokens: Tensor, targets: Tensor, passes: int | None = None
    ) -> Tensor:
        """Computes averaged gradients; returns this rank's part of the batch's mean loss.

        Args:
            tokens: Input tokens.
            targets: Next token of each position.
            passes: Number of passes; by default, as many as the rank with the most sequences needs.
        """
        share = self._share
        batch_tokens = self._config.batch_size * tokens.shape[1]
        passes = passes or self._config.num_passes(share.data_ranks)
        tokens, targets = share.take(tokens), share.take(targets)
        if self._laid_out is None:
            return self._in_passes(tokens, targets, passes, batch_tokens)
        with vocabulary_parallel(self._laid_out.splits_vocabulary):
            if self._laid_out.pipeline is None:
                return self._in_passes(tokens, targets, passes, batch_tokens)
            beat(Phase.FORWARD)
            scaled = self._laid_out.pipeline.forward_and_backward(tokens, targets)
            return scaled / share.gradient_ranks

    def _in_passes(self, tokens: Tensor, targets: Tensor, passes: int, batch_tokens: int) -> Tensor:
        """Runs the micro-batches one after the other."""
        total = torch.zeros((), device=self._device)
        if passes > 1 and not self._has_learned:
            self._learn_graph(tokens[:1])
        for number, (inputs, expected, counts) in enumerate(
            micro_batches(tokens, targets, passes), start=1
        ):
            is_local = number < passes
            with without_synchronization(self._model) if is_local else contextlib.nullcontext():
                beat(Phase.FORWARD)
                with self.autocast():
                    logits = self._model(inputs)
                loss = summed_loss(logits, expected)
                # Cancels the division by the number of ranks in the gradient average.
                scaled = loss * (self._share.gradient_ranks * counts / batch_tokens)
                beat(Phase.BACKWARD)
                scaled.backward()  # type: ignore[no-untyped-call]
            total += loss.detach() * counts
        return total / batch_tokens

    def _clip(self, max_norm: float) -> Tensor:
        if self._laid_out is None:
            return clip_grad_norm(self._model, max_norm)
        return self._laid_out.clip_grad_norm(self._model, max_norm)

    def _learn_graph(self, tokens: Tensor) -> None:
        """Runs a pass without side effects, so that a resumed run rounds as if uninterrupted."""
        with torch.random.fork_rng(), self.autocast():
            nothing: Tensor = self._model(tokens).sum() * 0
        nothing.backward()  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._has_learned = True

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Returns the autocast context of a forward pass."""
        return autocast(self._config.precision, self._device)
