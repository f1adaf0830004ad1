"""A model on a mesh as the trainer uses it: clipping, evaluation, logits to draw tokens from."""

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
    """How a model is laid over ranks that differ in more than their data."""

    groups: MeshGroups
    pipeline: Pipeline | None
    """Runs the stages of this rank with those of others; None where there is one stage."""
    vocab_size: int
    loss_scale: float
    """What the loss of a token is multiplied with in training, and in a pipeline always."""

    @property
    def splits_vocabulary(self) -> bool:
        """Whether tensor ranks have parts of the logits."""
        return self.groups.tensor is not None

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scales gradients down to a norm; returns the norm that they had.

        Args:
            model: All parameters of this rank.
            max_norm: The largest norm that is left as it is.
        """
        uncounted = []
        if self.pipeline is not None and self.pipeline.tied is not None:
            # The first stage counts a weight that the last one has a copy of.
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
        """Returns the loss, added up over tokens, on all ranks that have these; all call it.

        Args:
            model: This rank's part.
            tokens: This rank's tokens.
            targets: The token that follows each.
            autocast: What lowers the precision.
            num_micro_batches: Equal parts that go through a pipeline one behind the other.
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
        """Returns the logits of whole sequences, on all ranks; all call it.

        Args:
            model: This rank's part.
            tokens: As many as all axes divide.
            autocast: What lowers the precision.
        """
        share = None if self.groups.context is None else ContextShare(self.groups.context)
        own = tokens if share is None else share.take(tokens)
        if self.pipeline is not None:
            with vocabulary_parallel(self.splits_vocabulary):  # Its schedule computes a loss, too.
                logits = self.pipeline.logits(own, self.vocab_size)
        else:
            with autocast():
                logits = model(own)
        logits = whole_tensor(logits)
        self._reshard(model)
        return logits if share is None else share.put_together(logits, dim=1)

    @property
    def divisor(self) -> int:
        """What divides the tokens of every sequence that goes through the model."""
        layout = self.groups.layout
        parts = 2 * layout.context if layout.context > 1 else 1
        return parts * (layout.tensor if layout.sequence_parallel else 1)

    def _reshard(self, model: nn.Module) -> None:
        """Gives up what FSDP2 keeps gathered for a backward that does not come."""
        if self.pipeline is not None:
            return  # The schedule of an evaluation ends with it.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
