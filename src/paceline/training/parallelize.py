"""Builds a model that is ready to train, applying every technique in the required order.

A model on a mesh is cut into pipeline stages, each distributed over the ranks of its stage. A large
model does not fit on one rank. It is laid out on the meta device, where tensors have no values.
Every rank then draws one matrix after the other, as a single process would, and keeps its part, so
that it never holds more than one whole matrix. Every rank draws all matrices, because the values of
each depend on how many were drawn before.
"""

import contextlib
import dataclasses
import datetime
import pathlib
from collections.abc import Iterable
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.accounting.counts import divide_into_stages
from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout
from paceline.core.runnable import needs_mesh
from paceline.core.strategies import StrategyName
from paceline.health.checksum import StateTensor, state_tensors
from paceline.models import TransformerLM
from paceline.models.hugging_face import HuggingFaceLM
from paceline.models.layers import RMSNorm
from paceline.models.transformer import TransformerStage, draw_weight
from paceline.parallel import OuterLoop, Session
from paceline.parallel.dtensor import local_tensor, whole_tensor
from paceline.parallel.mesh.context import ContextShare
from paceline.parallel.mesh.layout import MeshGroups, apply_layout, clip_grad_norm
from paceline.parallel.mesh.pipeline import Context, Loss, Pipeline
from paceline.parallel.mesh.tensor import summed_loss, vocabulary_parallel
from paceline.parallel.strategies import apply_strategy
from paceline.training.config import RunConfig
from paceline.training.optimizers import make_optimizers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelModel:
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
        """Clips gradients to a maximum norm; returns their norm before clipping."""
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
        """Returns the loss summed over tokens, on all ranks with these tokens; all must call it."""
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
        """Returns the logits of whole sequences, on all ranks; all ranks must call it."""
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


@torch.no_grad()
def draw_parts(model: TransformerLM, seed: int) -> None:
    """Draws this rank's weights of a model; the rest of the model is on the meta device."""
    torch.manual_seed(seed)
    model.positions.reset_buffers()
    if model.shape.tied_embeddings:
        # Leaving the meta device unties the weights, and a stage may have only one of them.
        has_embedding = not model.embedding.weight.is_meta
        tied = model.embedding.weight if has_embedding else model.head.weight
        model.embedding.weight = model.head.weight = tied
    _draw_as_constructors_do(model)
    for weight, std in model.initial_weights():
        whole = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
        draw_weight(whole, std)
        if not weight.is_meta:
            local_tensor(weight).copy_(_part_of(whole, weight))
    for module in model.modules():
        if isinstance(module, RMSNorm) and not module.weight.is_meta:
            local_tensor(module.weight).fill_(1.0)


def _draw_as_constructors_do(model: TransformerLM) -> None:
    """Draws the random numbers that torch's layers draw when constructed on a real device."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.Linear(module.in_features, module.out_features, bias=False, device="cpu")
        elif isinstance(module, nn.Embedding):
            nn.Embedding(module.num_embeddings, module.embedding_dim, device="cpu")


def _part_of(whole: Tensor, tensor: Tensor) -> Tensor:
    """Returns the part of a whole tensor that this rank has of a sharded tensor like it."""
    if not isinstance(tensor, DTensor):
        return whole
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def own_stages(
    model: TransformerLM, groups: MeshGroups, context_length: int
) -> dict[int, TransformerStage]:
    """Returns this rank's stages by number; they reuse the modules of the model."""
    layout = groups.layout
    blocks = divide_into_stages(
        model.shape, context_length, layout.pipeline, layout.pipeline_interleave
    )
    numbers = range(groups.at.pipeline, len(blocks), layout.pipeline)
    return {number: TransformerStage(model, blocks[number]) for number in numbers}


def _end_weight(stages: Iterable[TransformerStage]) -> nn.Parameter | None:
    """Returns the weight of the embedding or of the head; None if no stage has either."""
    for stage in stages:
        for layer in (stage.embedding, stage.head):
            if layer is not None:
                assert isinstance(layer.weight, nn.Parameter)
                return layer.weight
    return None


def autocast(
    precision: Literal["float32", "bfloat16"], device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """Returns the context manager for a forward pass."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def parallelize(
    config: RunConfig, session: Session, model: TransformerLM, layout: ParallelLayout
) -> tuple[TransformerLM | TransformerStage, ParallelModel]:
    """Returns this rank's part of a model, and the mesh that the model is laid over."""
    groups = MeshGroups(layout, session.rank, session.world_size, session.device)
    # With this scale, averaging gradients over ranks yields the mean over all tokens.
    scale = groups.gradient_ranks / config.tokens_per_step
    pipeline = place_model(
        model,
        groups,
        context_length=config.data.context_length,
        num_micro_batches=config.training.num_passes(groups.data_ranks),
        loss=lambda logits, targets: summed_loss(logits, targets) * scale,
        forward_context=lambda: autocast(config.training.precision, session.device),
        compile_blocks=config.model.compile_blocks,
    )
    draw_parts(model, config.training.seed)
    parallel_model = ParallelModel(
        groups=groups, pipeline=pipeline, vocab_size=model.shape.vocab_size, loss_scale=scale
    )
    if pipeline is None:
        return model, parallel_model
    own = [stage.get_submodule("blocks") for stage in pipeline.stages.values()]
    numbers = [int(name) for blocks in own for name, _ in blocks.named_children()]
    return TransformerStage(model, numbers, has_embedding=pipeline.tied is not None), parallel_model


def place_model(
    model: TransformerLM,
    groups: MeshGroups,
    *,
    context_length: int,
    num_micro_batches: int,
    loss: Loss,
    forward_context: Context = contextlib.nullcontext,
    compile_blocks: bool = False,
) -> Pipeline | None:
    """Lays a model over its ranks; returns the schedule of this rank's stages, if it has stages.

    What was on the meta device has memory afterwards, but no values.
    """
    layout, mesh = groups.layout, groups.pipeline
    stages = {} if mesh is None else own_stages(model, groups, context_length)
    for part in stages.values() or (model,):
        apply_layout(part, groups, compile_blocks=compile_blocks)
        if any(parameter.is_meta for parameter in part.parameters()):
            part.to_empty(device=groups.device)
    if mesh is None:
        return None
    return Pipeline(
        stages,
        num_stages=layout.pipeline * layout.pipeline_interleave,
        num_micro_batches=num_micro_batches,
        loss=loss,
        group=mesh.get_group(),
        device=groups.device,
        forward_context=forward_context,
        tied=_end_weight(stages.values()) if model.shape.tied_embeddings else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataShard:
    """One rank's share of every batch."""

    data_rank: int
    """Index of the part it reads, of `data_ranks` parts; several ranks may read the same part."""
    data_ranks: int
    gradient_ranks: int
    """Number of ranks over which gradients are averaged: those with different tokens."""
    loss_weight: float
    """Weight of its loss in the sum over ranks: several ranks may compute the same loss."""
    counts_data: bool
    """Whether this rank adds its sequences to the step's digest: one rank per data-parallel rank
    does."""
    context: ContextShare | None = None
    """This rank's tokens of each sequence; None if it has all."""

    @classmethod
    def of_data_parallel(cls, rank: int, world_size: int) -> Self:
        """Returns the share of a rank in a purely data-parallel run."""
        return cls(
            data_rank=rank,
            data_ranks=world_size,
            gradient_ranks=world_size,
            loss_weight=1.0,
            counts_data=True,
        )

    @classmethod
    def of_mesh(cls, groups: MeshGroups) -> Self:
        """Returns the share of a rank on a mesh."""
        at = groups.at
        return cls(
            data_rank=groups.data_rank,
            data_ranks=groups.data_ranks,
            gradient_ranks=groups.gradient_ranks,
            loss_weight=1 / (groups.layout.tensor * groups.layout.pipeline),
            counts_data=at.tensor == at.context == at.pipeline == 0,
            context=None if groups.context is None else ContextShare(groups.context),
        )

    def take(self, tokens: Tensor) -> Tensor:
        """Returns this rank's part of the tokens of whole sequences."""
        return tokens if self.context is None else self.context.take(tokens)


_ON_MESH: StrategyName = "torch_fsdp2"
"""Strategy reported for a model on a mesh: like FSDP2, no rank holds a whole copy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """A model, its wrapper, and its optimizers."""

    module: TransformerLM | HuggingFaceLM | TransformerStage
    """The unwrapped model; with a pipeline, only this rank's blocks."""
    model: nn.Module
    """The model as wrapped by its strategy; call this one, except with a pipeline."""
    optimizers: dict[str, Optimizer]
    """Optimizers by their names in checkpoints."""
    strategy: StrategyName
    data_shard: DataShard
    """This rank's shard of each batch."""
    parallel_model: ParallelModel | None = None
    """The mesh that the model is on; None if ranks are only data-parallel."""
    outer: OuterLoop | None = None
    """Averages the model over several sites; None if there is one."""

    @property
    def site(self) -> dist.ProcessGroup | None:
        """Process group of the ranks that train one copy of the model; None if all ranks do."""
        return None if self.outer is None else self.outer.inner_group

    @property
    def stages(self) -> dist.ProcessGroup | None:
        """Process group of the pipeline's ranks; None if every rank has all blocks."""
        mesh = None if self.parallel_model is None else self.parallel_model.groups.pipeline
        return None if mesh is None else mesh.get_group()

    def tensors(self) -> list[StateTensor]:
        """Returns this rank's weights and optimizer state, for checksums."""
        return state_tensors(self.model, self.optimizers.values(), self.strategy)


def build(config: RunConfig, layout: ParallelLayout, session: Session) -> TrainState:
    """Builds the model of a run on this rank."""
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True)
    if needs_mesh(layout):
        with torch.device("meta"):
            whole = _make_transformer(config)
        own, parallel_model = parallelize(config, session, whole, layout)
        return TrainState(
            module=own,
            model=own,
            optimizers=make_optimizers(config.optimizer, _ON_MESH, own),
            strategy=_ON_MESH,
            data_shard=DataShard.of_mesh(parallel_model.groups),
            parallel_model=parallel_model,
        )
    # 1. The same weights on every rank and at any world size.
    torch.manual_seed(config.training.seed)
    module = _make_module(config).to(session.device)
    # 2. Compile blocks before hooks are registered between them.
    if config.model.compile_blocks and isinstance(module, TransformerLM):
        module.compile_blocks()
    # 3. The strategy wraps or shards the parameters; 4. optimizers get the result.
    sites = make_site_groups(config, session) if config.parallel.outer.sites > 1 else None
    inside = None if sites is None else sites.inside
    strategy = config.parallel.strategy_on(config.parallel.site_ranks(session.world_size))
    model = apply_strategy(
        strategy,
        module,
        config.parallel.bucket_size_for(strategy),
        config.parallel.compression if strategy != "none" else "none",
        group=inside,
    )
    optimizers = make_optimizers(config.optimizer, strategy, model, inside)
    # 5. The outer loop follows the optimizer that steps last.
    outer = None
    if sites is not None:
        outer = OuterLoop(
            model,
            [*optimizers.values()][-1],
            group=sites.across,
            inner_group=sites.inside,
            **dataclasses.asdict(config.parallel.outer.settings(config.training.steps)),
        )
    return TrainState(
        module=module,
        model=model,
        optimizers=optimizers,
        strategy=strategy,
        data_shard=DataShard.of_data_parallel(session.rank, session.world_size),
        outer=outer,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteGroups:
    """The groups of a rank of one of several sites."""

    across: dist.ProcessGroup
    """The ranks of the same place in each site."""
    inside: dist.ProcessGroup
    """The ranks of this site."""


def make_site_groups(config: RunConfig, session: Session) -> SiteGroups:
    """Creates the groups of this rank; all ranks must call it."""
    sites = config.parallel.outer.sites
    timeout = datetime.timedelta(seconds=config.parallel.timeout_s)
    ranks = config.parallel.site_ranks(session.world_size)
    if config.training.batch_size % session.world_size:
        raise UsageError(
            f"parallel.outer.sites {sites} need equal shares of every batch, and "
            f"training.batch_size {config.training.batch_size} is not divisible by "
            f"{session.world_size} ranks; change training.batch_size"
        )
    site, place = divmod(session.rank, ranks)

    def join(members: range) -> dist.ProcessGroup:
        group = dist.new_group([*members], timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    return SiteGroups(
        across=join(range(place, session.world_size, ranks)),
        inside=join(range(site * ranks, (site + 1) * ranks)),
    )


def _make_transformer(config: RunConfig) -> TransformerLM:
    recompute = config.model.activation_checkpointing
    return TransformerLM(config.model.shape, activation_checkpointing=recompute)


def _make_module(config: RunConfig) -> TransformerLM | HuggingFaceLM:
    if config.model.hugging_face is None:
        return _make_transformer(config)
    module = HuggingFaceLM.of_directory(pathlib.Path(config.model.hugging_face))
    longest = module.max_context_length
    if longest is not None and config.data.context_length > longest:
        raise UsageError(
            f"data.context_length {config.data.context_length:,} is more than the {longest:,} "
            f"positions of model.hugging_face {config.model.hugging_face}; lower it"
        )
    return module
