"""The config of a planned run, and what the user's config says about all of them.

A run has the user's config, except for the keys that the design decides.
"""

import dataclasses
import pathlib
from typing import Any

from paceline.core.errors import UsageError
from paceline.data.manifest import read_manifest
from paceline.data.storage import open_storage
from paceline.loop.sweep_design import PlannedRun
from paceline.scaling.model_shapes import Ladder, ladder_like
from paceline.training.config import ModelConfig, RunConfig, dimensions

DECIDED: dict[str, str] = {
    "out": "each run has a directory of its own, inside of `--out`",
    "model.hugging_face": "refused: the runs have models of many sizes, and this is a single one",
    "model.d_model": "the runs have models of many sizes, to find the best one for the FLOPs",
    "model.num_layers": "depth follows width, so that the losses of all sizes lie on one curve",
    "model.num_heads": "the number of heads follows width",
    "model.head_dim": "a head is as wide as the model divided by its heads",
    "model.d_ff": "8/3 of the width; if you set it, `d_ff / d_model` of your config times the "
    "width",
    "model.num_kv_heads": "as many as query heads; if you set it, each is shared by as many query "
    "heads as in your config, or by the next larger number that divides them",
    "training.steps": "a run ends when its FLOPs are spent",
    "training.batch_size": "Step Law gives it from the tokens of a run, corrected by the batch "
    "stage",
    "training.seed": "all runs have the seed of `--seed`",
    "optimizer.learning_rate": "Step Law gives it from the size of the model, corrected by the "
    "rate stage",
    "schedule.warmup_steps": "5% of the steps, which differ from run to run",
    "parallel.strategy": "a loop's final run has the fastest strategy of the plan stage, and so do "
    "the pilot runs that compare them; a sweep keeps yours",
    "checkpoint.every_steps": "a pilot run saves halfway, so that its peak memory is that of the "
    "whole run; all others keep yours",
    "evaluation.every_steps": "only the loss after the last step counts; a loop's final run is "
    "evaluated ten times",
    "evaluation.sample_prompt": "nobody reads samples of the small runs; a loop's final run keeps "
    "yours",
}
"""Why the design of a sweep or a loop decides a key; every other key is the user's."""


def run_config(base: RunConfig, run: PlannedRun, directory: pathlib.Path) -> RunConfig:
    """Returns the config of a run: the base with the run's model, length and hyperparameters."""
    return dataclasses.replace(
        base,
        out=str(directory),
        model=_model(base.model, run),
        training=dataclasses.replace(
            base.training, steps=run.steps, batch_size=run.batch_size, seed=run.seed
        ),
        optimizer=dataclasses.replace(base.optimizer, learning_rate=run.learning_rate),
        schedule=dataclasses.replace(base.schedule, warmup_steps=run.warmup_steps),
        # Only the final loss is used.
        evaluation=dataclasses.replace(base.evaluation, every_steps=run.steps, sample_prompt=None),
    )


def _model(base: ModelConfig, run: PlannedRun) -> ModelConfig:
    """Returns the model of a run; its shape, as planned, includes what the base says about it."""
    # None stands for the preset's in a config, and for derived values in a shape.
    shape = dimensions(run.shape) | {
        "num_kv_heads": run.shape.key_value_heads,
        "head_dim": run.shape.head_width,
    }
    if not run.is_whole_shape:
        shape |= {"rope_theta": None, "norm_epsilon": None}
    return dataclasses.replace(base, **shape)


def limits_of(base: RunConfig, *, epochs: float, seed: int) -> dict[str, Any]:
    """Returns the `Limits` of runs that share a config, by name, for a spec of a sweep or a loop.

    Raises an error if evaluation is disabled, because the runs could not be compared.
    """
    if not base.evaluation.sequences:
        raise UsageError(
            "evaluation.sequences is 0, and runs are compared by their held-out losses; set it to "
            "64 or more"
        )
    manifests = [read_manifest(open_storage(source.place)) for source in base.data.sources]
    return {
        "vocab_size": base.model.shape.vocab_size,
        "context_length": base.data.context_length,
        "most_tokens": epochs * sum(each.splits["train"].num_tokens for each in manifests),
        "seed": seed,
        "ladder": ladder_of(base),
    }


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
