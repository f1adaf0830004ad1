"""One training step: micro-batches, one average over ranks, one decision, one update.

Phases on every rank:

1. The rank's sequences go through the model in micro-batches. Each loss is scaled so that the
   average over ranks is the mean over all tokens of the batch, even if some ranks have more.
   Strategies that shard parameters communicate in every pass. Ranks whose shards of a batch differ
   by a sequence therefore run the same number of passes, if necessary with one that does not count.
2. Gradients are averaged in the last micro-batch; earlier micro-batches only accumulate them.
3. One all-reduce sums everything that ranks must agree on: the loss, whether to stop, and the notes
   of the health monitor. From these sums, all ranks decide identically whether to apply the update.
4. The optimizers step, on all ranks or on none.

Sites of an outer loop average gradients by themselves, and all of them take part in phase 3: it
waits for the latency of the links between sites. Data, decisions and the record of what was trained
on are those of a run with one site.

Elastic replicas sum gradients and numbers over their own group instead, which outlives any of them,
and then agree on whether the step commits: it does not if a replica was lost while it ran.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from paceline.data.audit import DIGEST_PARTS, join_digest, split_digest
from paceline.devices import accelerator
from paceline.health.monitor import HealthMonitor
from paceline.parallel.mesh.tensor import summed_loss, vocabulary_parallel
from paceline.parallel.ranks.heartbeats import Phase, beat
from paceline.parallel.strategies import clip_grad_norm, without_synchronization
from paceline.training.config import StepConfig, num_passes
from paceline.training.parallelize import TrainState, autocast
from paceline.training.replicas import Replicas


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
    is_committed: bool = True
    """Whether every sum includes all members; if not, nothing has changed."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class TrainingStep:
    """Runs training steps of one model on this rank.

    The monitor decides which updates are applied; without one, all finite ones are.
    """

    def __init__(
        self,
        config: StepConfig,
        train_state: TrainState,
        device: torch.device,
        monitor: HealthMonitor | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self._config = config
        self._model = train_state.model
        self._optimizers = list(train_state.optimizers.values())
        self._device = device
        self._monitor = monitor
        self._replicas = replicas
        self._shard = train_state.data_shard
        self._parallel_model = train_state.parallel_model
        self._is_one_of_sites = train_state.outer is not None
        # torch's DDP records its static graph in the first pass, which must average gradients.
        self._has_learned = not isinstance(self._model, DistributedDataParallel)

    def run(
        self, tokens: Tensor, targets: Tensor, *, stop: bool = False, digest: int = 0
    ) -> StepResult:
        """Trains on this rank's sequences of a global batch, whose digest is `digest`.

        `stop` says whether this rank was asked to stop; the result tells all ranks.
        """
        loss = self.forward_and_backward(tokens, targets)
        read = digest if self._shard.counts_data else 0
        notes = () if self._monitor is None else self._monitor.notes()
        own = accelerator.send_numbers([float(stop), *split_digest(read), *notes], self._device)
        beat(Phase.ALL_REDUCE)
        # With an infinite maximum norm, torch measures the norm without clipping.
        norm = self._clip(self._config.clip_norm or math.inf)
        counted = loss.double() * self._shard.loss_weight
        sums = torch.cat([counted.view(1), own])
        if self._is_one_of_sites:
            # Sites have other gradients, and must decide alike: the mean of their norms decides.
            sums = torch.cat([sums, norm.to(sums).view(1) / dist.get_world_size()])
        if self._replicas is None:
            dist.all_reduce(sums)
        else:
            self._replicas.add_up(sums)
        if not self._is_one_of_sites:
            sums = torch.cat([sums, norm.to(sums).view(1)])
        # The host waits here and nowhere else in a step: all work has been launched.
        total, num_stops, *rest, gradient_norm = sums.tolist()
        result = StepResult(
            loss=total,
            gradient_norm=gradient_norm,
            stop=num_stops > 0,
            digest=join_digest(rest[:DIGEST_PARTS]),
            # Non-finite sums of replicas either do not commit, or are the same on all of them.
            is_committed=self._replicas is None or self._replicas.commit(),
        )
        beat(Phase.UPDATE)
        if result.is_committed and self._should_apply(result, rest[DIGEST_PARTS:]):
            for optimizer in self._optimizers:
                optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        return result

    def _should_apply(self, result: StepResult, notes: list[float]) -> bool:
        if self._monitor is None:
            return result.is_finite
        return self._monitor.should_apply(result.loss, result.gradient_norm, notes)

    def forward_and_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Computes averaged gradients; returns this rank's part of the batch's mean loss."""
        shard, replicas = self._shard, self._replicas
        batch_size, data_ranks = self._config.batch_size, shard.data_ranks
        if replicas is not None:
            batch_size, data_ranks = replicas.batch_size, replicas.members.live
        batch_tokens = batch_size * tokens.shape[1]
        passes = num_passes(batch_size, data_ranks, self._config.micro_batch_size)
        tokens, targets = shard.take(tokens), shard.take(targets)
        if self._parallel_model is None:
            with contextlib.nullcontext() if replicas is None else replicas.summed(passes):
                return self._in_passes(tokens, targets, passes, batch_tokens)
        with vocabulary_parallel(self._parallel_model.splits_vocabulary):
            if self._parallel_model.pipeline is None:
                return self._in_passes(tokens, targets, passes, batch_tokens)
            beat(Phase.FORWARD)
            scaled = self._parallel_model.pipeline.forward_and_backward(tokens, targets)
            return scaled / shard.gradient_ranks

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
                loss = self._loss(inputs, expected)
                # Cancels the division by the number of ranks in the gradient average.
                scaled = loss * (self._shard.gradient_ranks * counts / batch_tokens)
                beat(Phase.BACKWARD)
                scaled.backward()  # type: ignore[no-untyped-call]
            total += loss.detach() * counts
        return total / batch_tokens

    def _loss(self, inputs: Tensor, expected: Tensor) -> Tensor:
        """Returns the loss summed over tokens. Its caller holds no logits while backward runs."""
        with self.autocast():
            logits = self._model(inputs)
        return summed_loss(logits, expected)

    def _clip(self, max_norm: float) -> Tensor:
        if self._parallel_model is None:
            return clip_grad_norm(self._model, max_norm)
        return self._parallel_model.clip_grad_norm(self._model, max_norm)

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


def micro_batches(
    tokens: Tensor, targets: Tensor, passes: int
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yields the inputs of each pass, their targets, and whether the pass counts."""
    for inputs, expected in zip(
        tokens.tensor_split(passes), targets.tensor_split(passes), strict=True
    ):
        if len(inputs):
            yield inputs, expected, True
        else:
            yield tokens[:1], targets[:1], False
