"""Loss on held-out text: the same sequences every time, shared by the ranks."""

import contextlib
import dataclasses
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.format.manifest import read_manifest
from paceline.data.loader.config import LoaderConfig
from paceline.data.loader.torch_batches import TorchLoader
from paceline.data.storage import open_storage
from paceline.training.config import RunConfig, num_passes
from paceline.training.steps.micro_batches import micro_batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model on held-out text."""

    loss: float
    """Mean cross-entropy per token, in nats."""
    bits_per_byte: float
    """The same per byte of text, which does not depend on the tokenizer."""


class HeldOut:
    """The held-out sequences of a run, read once.

    Args:
        config: How they are read; its batch is all of them.
        micro_batch_size: Sequences at a time.
        device: Where the model computes.
    """

    def __init__(self, config: LoaderConfig, micro_batch_size: int, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._bytes_per_token = _bytes_per_token(config)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        with TorchLoader(config, device=device, rank=rank, world_size=world_size) as loader:
            self._batch = next(loader)
        self._num_passes = num_passes(config.batch_size, world_size, micro_batch_size)

    @classmethod
    def of(cls, config: RunConfig, device: torch.device) -> "HeldOut | None":
        """Returns the held-out sequences of a run; None if it evaluates nothing."""
        if not config.evaluation.sequences:
            return None
        loader = dataclasses.replace(
            config.loader("heldout"), batch_size=config.evaluation.sequences, prefetch=0
        )
        return cls(loader, config.training.micro_batch_size, device)

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, autocast: Callable[[], contextlib.AbstractContextManager[object]]
    ) -> Evaluation:
        """Returns the loss; all ranks call it and get the same.

        Args:
            model: As it is trained.
            autocast: What lowers the precision of a forward pass.
        """
        batch = self._batch
        was_training = model.training
        model.eval()
        total = torch.zeros((), device=self._device)
        for tokens, targets, counts in micro_batches(batch.tokens, batch.targets, self._num_passes):
            with autocast():
                logits: Tensor = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            total += loss * counts
        model.train(was_training)
        dist.all_reduce(total)
        mean = total.item() / (self._config.batch_size * self._config.context_length)
        return Evaluation(loss=mean, bits_per_byte=mean / math.log(2) / self._bytes_per_token)


def _bytes_per_token(config: LoaderConfig) -> float:
    """Returns the mean over the sources by weight, as their manifests know it."""
    total = weights = 0.0
    for source in config.sources:
        manifest = read_manifest(open_storage(source.place))
        total += source.weight * manifest.source_bytes_per_token
        weights += source.weight
    return total / weights
