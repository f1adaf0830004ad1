"""Builds a model that is ready to train, applying every technique in the required order."""

import dataclasses
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.core.runnable import needs_mesh
from paceline.core.strategies import StrategyName
from paceline.models import TransformerLM
from paceline.models.hugging_face.adapter import HuggingFaceLM
from paceline.models.stage import TransformerStage
from paceline.parallel import Session
from paceline.parallel.strategies import apply_strategy
from paceline.training.config import RunConfig
from paceline.training.layouts.build import lay_out
from paceline.training.layouts.laid_out import LaidOut
from paceline.training.layouts.layout import layout_of
from paceline.training.steps.optimizers import make_optimizers
from paceline.training.steps.share import BatchShare

_ON_MESH: StrategyName = "torch_fsdp2"
"""Strategy reported for a model on a mesh: like FSDP2, no rank holds a whole copy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model, its wrapper, and its optimizers."""

    module: TransformerLM | HuggingFaceLM | TransformerStage
    """The unwrapped model; with a pipeline, only this rank's blocks."""
    model: nn.Module
    """The model as wrapped by its strategy; call this one, except with a pipeline."""
    optimizers: dict[str, Optimizer]
    """Optimizers by their names in checkpoints."""
    strategy: StrategyName
    share: BatchShare
    """This rank's share of each batch."""
    laid_out: LaidOut | None = None
    """The mesh that the model is on; None if ranks are only data-parallel."""

    @property
    def stages(self) -> dist.ProcessGroup | None:
        """Process group of the pipeline's ranks; None if every rank has all blocks."""
        mesh = None if self.laid_out is None else self.laid_out.groups.pipeline
        return None if mesh is None else mesh.get_group()


def build(config: RunConfig, session: Session) -> Trainee:
    """Builds the model of a run on this rank."""
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True)
    layout = layout_of(config, session.world_size)
    if needs_mesh(layout):
        with torch.device("meta"):
            whole = _make_transformer(config)
        own, laid_out = lay_out(config, session, whole, layout)
        return Trainee(
            module=own,
            model=own,
            optimizers=make_optimizers(config.optimizer, _ON_MESH, own),
            strategy=_ON_MESH,
            share=BatchShare.of_mesh(laid_out.groups),
            laid_out=laid_out,
        )
    # 1. The same weights on every rank and at any world size.
    torch.manual_seed(config.training.seed)
    module = _make_module(config).to(session.device)
    # 2. Compile blocks before hooks are registered between them.
    if config.model.compile_blocks and isinstance(module, TransformerLM):
        module.compile_blocks()
    # 3. The strategy wraps or shards the parameters; 4. optimizers get the result.
    strategy = config.parallel.strategy_on(session.world_size)
    model = apply_strategy(strategy, module, config.parallel.bucket_size_for(strategy))
    optimizers = make_optimizers(config.optimizer, strategy, model)
    return Trainee(
        module=module,
        model=model,
        optimizers=optimizers,
        strategy=strategy,
        share=BatchShare.of_data_parallel(session.rank, session.world_size),
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
