"""A model on a mesh: gradient clipping, evaluation, and logits for generation."""

import dataclasses

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.parallel.buckets import whole_tensor
from paceline.parallel.mesh.context import ContextShare
from paceline.parallel.mesh.gradients import clip_grad_norm
from paceline.parallel.mesh.groups import MeshGroups
from paceline.parallel.mesh.loss import summed_loss, vocabulary_parallel
from paceline.parallel.mesh.pipeline import Context, Pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaidOut:
    """Distribution of a model over ranks that differ in more than their data."""

    groups: MeshGroups
    pipeline: Pipeline | None
    """Runs this rank's stages together with those of other ranks; None if there is one stage."""
    vocab_size: int
    loss_scale: float
    """Factor of each token's loss in training, and with a pipeline also in evaluation."""

    @property
    def splits_vocabulary(self) -> bool:
        """Whether the logits are split over tensor-parallel ranks."""
        return self.groups.tensor is not None

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clips gradients to a maximum norm; returns their norm before clipping.

        Args:
            model: All parameters of this rank.
            max_norm: Maximum norm.
        """
        uncounted = []
        if self.pipeline is not None and self.pipeline.tied is not None:
            # Count a tied weight once: on the first stage, not its copy on the last one.
            uncounted = [] if self.pipeline.is_first else [self.pipeline.tied]
        return clip_grad_norm(model, self.groups, max_norm, uncounted)

    @torch.no_grad()
    def summed_loss(
        self,
        model: nn.Module,
        tokens: Tensor,
        targets: Tensor,
        autocast: Context,
        *,
        num_micro_batches: int = 1,
    ) -> Tensor:
        """Returns the loss summed over tokens, on all ranks with these tokens; all must call it.

        Args:
            model: This rank's part of the model.
            tokens: This rank's tokens.
            targets: Next token of each position.
            autocast: Creates the autocast context of a forward pass.
            num_micro_batches: Equal parts to run back to back through a pipeline.
        """
        with vocabulary_parallel(self.splits_vocabulary):
            if self.pipeline is not None:
                scaled = self.pipeline.evaluate(tokens, targets, num_micro_batches)
                loss = scaled / self.loss_scale
            else:
                with autocast():
                    logits = model(tokens)
                loss = summed_loss(logits, targets)
        self._reshard(model)
        return loss

    @torch.no_grad()
    def logits(self, model: nn.Module, tokens: Tensor, autocast: Context) -> Tensor:
        """Returns the logits of whole sequences, on all ranks; all ranks must call it.

        Args:
            model: This rank's part of the model.
            tokens: Whole sequences, whose length must be a multiple of `divisor`.
            autocast: Creates the autocast context of a forward pass.
        """
        share = None if self.groups.context is None else ContextShare(self.groups.context)
        own = tokens if share is None else share.take(tokens)
        if self.pipeline is not None:
            with vocabulary_parallel(self.splits_vocabulary):  # The schedule also computes a loss.
                logits = self.pipeline.logits(own, self.vocab_size)
        else:
            with autocast():
                logits = model(own)
        logits = whole_tensor(logits)
        self._reshard(model)
        return logits if share is None else share.put_together(logits, dim=1)

    @property
    def divisor(self) -> int:
        """Number that must divide the length of every sequence."""
        layout = self.groups.layout
        parts = 2 * layout.context if layout.context > 1 else 1
        return parts * (layout.tensor if layout.sequence_parallel else 1)

    def _reshard(self, model: nn.Module) -> None:
        """Frees the parameters that FSDP2 keeps gathered for a backward pass that never runs."""
        if self.pipeline is not None:
            return  # The evaluation schedule already reshards.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
