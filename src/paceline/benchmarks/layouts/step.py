"""A training step of one batch under a layout, on this rank."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.benchmarks.harness.memory import step_peaks
from paceline.benchmarks.layouts.config import LayoutCase
from paceline.benchmarks.layouts.layout_text import WrittenLayout
from paceline.core.ranges import BACKWARD, FORWARD, OPTIMIZER, step_range
from paceline.kernels.named_range import named_range
from paceline.models import TransformerLM
from paceline.parallel.buckets import local_tensor
from paceline.parallel.mesh.context import ContextShare
from paceline.parallel.mesh.groups import MeshGroups
from paceline.parallel.mesh.loss import summed_loss, vocabulary_parallel
from paceline.parallel.mesh.tensor import complete_gradients
from paceline.parallel.ranks.device_clock import now, seconds_between, synchronize
from paceline.parallel.strategies import without_synchronization
from paceline.training.layouts.build import place_model

STEP = "step_time_s"
PEAK = "peak_bytes"
_LEARNING_RATE = 1e-4


class LayoutStep:
    """This rank's part of a model under a layout, with its batch and its optimizer.

    Args:
        case: The model and the batch.
        written: The layout.
        device: The device that this rank computes on.
    """

    def __init__(self, case: LayoutCase, written: WrittenLayout, device: torch.device) -> None:
        layout = written.layout
        self._device = device
        self._groups = MeshGroups(layout, dist.get_rank(), dist.get_world_size(), device)
        self._num_passes = case.num_micro_batches(written)
        # Averaging over ranks divides by their number; the scale compensates for it.
        num_tokens = case.batch_size * case.context_length
        self._loss_scale = self._groups.gradient_ranks / num_tokens
        self._range = step_range(written.text)
        with torch.device("meta"):
            model = TransformerLM(case.shape)
        self._pipeline = place_model(
            model,
            self._groups,
            context_length=case.context_length,
            num_micro_batches=self._num_passes,
            loss=self._loss,
            seed=0,
            schedule="zero_bubble" if written.zero_bubble else "1f1b",
        )
        self._model: nn.Module = model
        if self._pipeline is not None:
            self._model = nn.ModuleList(self._pipeline.stages.values())
        self._tokens, self._targets = self._batch(case)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), _LEARNING_RATE, fused=True)

    def _batch(self, case: LayoutCase) -> tuple[Tensor, Tensor]:
        """Returns this rank's sequences or, with context parallelism, its tokens of them."""
        groups = self._groups
        torch.manual_seed(groups.data_rank + 1)
        size = (case.batch_size // groups.data_ranks, case.context_length + 1)
        sequences = torch.randint(case.shape.vocab_size, size, device=self._device)
        tokens, targets = sequences[:, :-1], sequences[:, 1:]
        if groups.context is not None:
            share = ContextShare(groups.context)
            tokens, targets = share.take(tokens), share.take(targets)
        return tokens.contiguous(), targets.contiguous()

    def run(self) -> dict[str, float]:
        """Runs one step on this rank and returns its seconds; the ranks start together."""
        dist.barrier()
        synchronize(self._device)
        with named_range(self._range):
            began = now(self._device)
            self.forward_and_backward()
            self.optimizer_step()
            ended = now(self._device)
        synchronize(self._device)
        return {STEP: seconds_between(began, ended)}

    def forward_and_backward(self) -> None:
        """Runs all passes of a step and leaves averaged gradients."""
        with vocabulary_parallel(self._groups.tensor is not None):
            if self._pipeline is not None:
                self._pipeline.forward_and_backward(self._tokens, self._targets)
            else:
                self._run_passes()
        complete_gradients(self._model)

    def _run_passes(self) -> None:
        parts = zip(
            self._tokens.chunk(self._num_passes), self._targets.chunk(self._num_passes), strict=True
        )
        for number, (tokens, targets) in enumerate(parts, start=1):
            if number < self._num_passes:
                with without_synchronization(self._model):
                    self._run_pass(tokens, targets)
            else:
                self._run_pass(tokens, targets)

    def _run_pass(self, tokens: Tensor, targets: Tensor) -> None:
        with named_range(FORWARD):
            loss = self._loss(self._model(tokens), targets)
        with named_range(BACKWARD):
            torch.autograd.backward(loss)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return summed_loss(logits, targets) * self._loss_scale

    def optimizer_step(self) -> None:
        """Updates the parameters and drops the gradients."""
        with named_range(OPTIMIZER):
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def peak_bytes(self) -> int:
        """Runs one more step and returns this rank's peak memory."""
        state = [
            value
            for values in self._optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        kept = [*self._model.parameters(), *self._model.buffers(), *state]
        local = [local_tensor(tensor) for tensor in kept]
        phases = {"passes": self.forward_and_backward, "optimizer": self.optimizer_step}
        peaks = step_peaks(self._device, resident_tensors=local, phases=phases)
        return max(peaks.values())
