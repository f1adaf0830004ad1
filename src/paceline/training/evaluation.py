"""Evaluation of a model: loss on held-out text, and continuations of a prompt."""

import contextlib
import dataclasses
import itertools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.data.loader.config import LoaderConfig
from paceline.data.loader.torch_batches import TorchLoader
from paceline.data.manifest import TOKENIZER, read_manifest
from paceline.data.storage import open_storage
from paceline.data.tokenizer import Tokenizer
from paceline.models.generation import generate
from paceline.parallel.mesh.pipeline import Context
from paceline.parallel.mesh.tensor import summed_loss
from paceline.training.config import RunConfig, num_passes
from paceline.training.parallelize import TrainState
from paceline.training.step import micro_batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of an evaluation on held-out text."""

    loss: float
    """Mean cross-entropy per token, in nats."""
    bits_per_byte: float
    """Cross-entropy in bits per byte of text, which does not depend on the tokenizer."""


class HeldOut:
    """Held-out sequences of a run, read once, the same in every evaluation and split over ranks."""

    def __init__(self, config: RunConfig, train_state: TrainState, device: torch.device) -> None:
        sequences = config.evaluation.sequences
        held_out = dataclasses.replace(config.loader("heldout"), batch_size=sequences, prefetch=0)
        self._num_tokens = sequences * config.data.context_length
        self._device = device
        self._bytes_per_token = _bytes_per_token(held_out)
        self._shard = train_state.data_shard
        rank, ranks = self._shard.data_rank, self._shard.data_ranks
        with TorchLoader(held_out, device=device, rank=rank, world_size=ranks) as loader:
            self._batch = next(loader)
        # At most a step's micro-batch, so that evaluation needs no more memory than a step.
        largest_part = -(-config.training.batch_size // ranks)
        at_a_time = min(config.training.micro_batch_size, largest_part)
        self._num_passes = num_passes(sequences, ranks, at_a_time)
        # Computed from global sizes, because sharded ranks must all run the same collectives.
        self._is_even = sequences % (ranks * self._num_passes) == 0

    @torch.no_grad()
    def evaluate(self, train_state: TrainState, autocast: Context) -> Evaluation:
        """Returns the loss, identical on all ranks; all ranks must call it."""
        batch, model, shard = self._batch, train_state.model, self._shard
        passes, at_once = self._num_passes, 1
        if train_state.stages is not None and self._is_even:
            passes, at_once = 1, passes  # Back to back through the pipeline.
        was_training = model.training
        model.eval()
        total = torch.zeros((), device=self._device)
        for tokens, targets, counts in micro_batches(batch.tokens, batch.targets, passes):
            own, expected = shard.take(tokens), shard.take(targets)
            if train_state.parallel_model is not None:
                loss = train_state.parallel_model.summed_loss(
                    model, own, expected, autocast, num_micro_batches=at_once
                )
            else:
                with autocast():
                    logits: Tensor = model(own)
                loss = summed_loss(logits, expected)
            total += loss * (counts * shard.loss_weight)
        model.train(was_training)
        dist.all_reduce(total)
        mean = total.item() / self._num_tokens
        return Evaluation(loss=mean, bits_per_byte=mean / math.log(2) / self._bytes_per_token)


class Sampler:
    """Continues a prompt by greedy decoding, so that samples are deterministic."""

    def __init__(
        self, prompt: str, config: RunConfig, train_state: TrainState, device: torch.device
    ) -> None:
        storage = open_storage(config.data.sources[0].place)
        self._tokenizer = Tokenizer(
            storage.read(TOKENIZER).decode(), read_manifest(storage).end_of_document, storage.url
        )
        self._is_compiled = config.model.compile_blocks
        self._num_tokens = config.evaluation.sample_tokens
        self._prompt = torch.tensor(self._tokenizer.encode_prompt(prompt), device=device)
        longest, room = train_state.module.max_context_length, self._room(train_state)
        if len(self._prompt) >= room:
            cut = "" if room == longest else f", of which the layout's ranks can split {room:,}"
            raise UsageError(
                f"evaluation.sample_prompt has {len(self._prompt):,} tokens, and the model's "
                f"context is {longest:,}{cut}; shorten the prompt"
            )

    def sample(self, train_state: TrainState, autocast: Context) -> str:
        """Returns the continuation; all ranks must call it: each may hold a part of the model."""
        was_training = train_state.model.training
        train_state.model.eval()
        # Compiled blocks would be recompiled for every length.
        as_written = torch.compiler.set_stance("force_eager") if self._is_compiled else None
        parallel_model, room = train_state.parallel_model, self._room(train_state)

        def filled(tokens: Tensor) -> Tensor:
            assert parallel_model is not None
            # Attention is causal: padding after a token does not affect it.
            whole = F.pad(tokens, (0, room - tokens.shape[1]))
            return parallel_model.logits(train_state.model, whole, autocast)[:, : tokens.shape[1]]

        with autocast(), as_written or contextlib.nullcontext():
            made = generate(
                train_state.module,
                self._prompt,
                min(self._num_tokens, room - len(self._prompt)),
                temperature=0,
                forward=train_state.model if parallel_model is None else filled,
                cached=parallel_model is None,
            )
            # Do not stop at the end of the document: all ranks must run the same number of passes.
            tokens = list(made)
        train_state.model.train(was_training)
        end = self._tokenizer.end_of_document
        return self._tokenizer.decode(itertools.takewhile(lambda token: token != end, tokens))

    def _room(self, train_state: TrainState) -> int:
        """Returns the length of prompt and continuation, rounded to what the mesh can split."""
        room, longest = len(self._prompt) + self._num_tokens, train_state.module.max_context_length
        divisor = 1 if train_state.parallel_model is None else train_state.parallel_model.divisor
        room += -room % divisor
        return room if longest is None else min(room, longest - longest % divisor)


def _bytes_per_token(config: LoaderConfig) -> float:
    """Returns the bytes per token from the sources' manifests, averaged by weight."""
    total = weights = 0.0
    for source in config.sources:
        manifest = read_manifest(open_storage(source.place))
        total += source.weight * manifest.source_bytes_per_token
        weights += source.weight
    return total / weights
