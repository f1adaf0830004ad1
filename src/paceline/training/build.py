"""From a config to a model that is ready to train: every technique, in the order it must have."""

import dataclasses
import pathlib

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.core.strategies import StrategyName
from paceline.models import TransformerLM
from paceline.models.hugging_face.adapter import HuggingFaceLM
from paceline.parallel import Session
from paceline.parallel.strategies import apply_strategy
from paceline.training.config import RunConfig
from paceline.training.steps.optimizers import make_optimizers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model, what wraps it, and what trains it."""

    module: TransformerLM | HuggingFaceLM
    """The model itself."""
    model: nn.Module
    """The model as its strategy has wrapped it: what is called."""
    optimizers: dict[str, Optimizer]
    """By the names that checkpoints know them by."""
    strategy: StrategyName


def build(config: RunConfig, session: Session) -> Trainee:
    """Builds the model of a run on this rank."""
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True)
    # 1. The same weights on every rank and for every number of ranks.
    torch.manual_seed(config.training.seed)
    module = _make_module(config).to(session.device)
    # 2. Blocks are compiled before hooks come between them.
    if config.model.compile_blocks and isinstance(module, TransformerLM):
        module.compile_blocks()
    # 3. The strategy takes the parameters; 4. optimizers take what it leaves of them.
    strategy = config.parallel.strategy_on(session.world_size)
    model = apply_strategy(strategy, module, config.parallel.bucket_size_for(strategy))
    optimizers = make_optimizers(config.optimizer, strategy, model)
    return Trainee(module=module, model=model, optimizers=optimizers, strategy=strategy)


def _make_module(config: RunConfig) -> TransformerLM | HuggingFaceLM:
    if config.model.hugging_face is None:
        recompute = config.model.activation_checkpointing
        return TransformerLM(config.model.shape, activation_checkpointing=recompute)
    module = HuggingFaceLM.of_directory(pathlib.Path(config.model.hugging_face))
    longest = module.max_context_length
    if longest is not None and config.data.context_length > longest:
        raise UsageError(
            f"data.context_length {config.data.context_length:,} is more than the {longest:,} "
            f"positions of model.hugging_face {config.model.hugging_face}"
        )
    return module
