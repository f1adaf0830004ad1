"""What the config shared by a sweep's runs says about its question: text, models, evaluation."""

import dataclasses

from paceline.core.errors import UsageError
from paceline.data.manifest import read_manifest
from paceline.data.storage import open_storage
from paceline.scaling.model_shapes import Ladder, ladder_like
from paceline.training.config import RunConfig


def require_evaluation(base: RunConfig) -> None:
    """Raises an error if evaluation is disabled, because runs could not be compared."""
    if not base.evaluation.sequences:
        raise UsageError(
            "evaluation.sequences is 0, and runs are compared by their held-out losses; set it to "
            "64 or more"
        )


def training_tokens(base: RunConfig) -> int:
    """Returns the number of tokens in the training splits."""
    manifests = [read_manifest(open_storage(source.place)) for source in base.data.sources]
    return sum(manifest.splits["train"].num_tokens for manifest in manifests)


def ladder_of(base: RunConfig) -> Ladder:
    """Returns the models to choose from: all that the config says about the model but its size.

    Ratios are those of the config only if it names the width of the feed-forward layer or the
    key-value heads: the ratios of a preset are those of one size.
    """
    model, shape = base.model, base.model.shape
    longest = model.max_context_length or base.data.context_length
    queries = 1 if model.num_kv_heads is None else shape.num_heads // shape.key_value_heads
    return ladder_like(
        dataclasses.replace(shape, max_context_length=longest),
        d_ff_ratio=Ladder.d_ff_ratio if model.d_ff is None else shape.d_ff / shape.d_model,
        queries_per_key_value_head=max(1, queries),
    )
