"""The config of a planned run: the user's, except for the keys that the design decides."""

import dataclasses
import pathlib

from paceline.core.specs import ModelShape
from paceline.training.config import ModelConfig, RunConfig
from paceline.workflows.sweep.design import PlannedRun

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
    keys = {field.name for field in dataclasses.fields(ModelConfig)}
    shape = {
        field.name: getattr(run.shape, field.name)
        for field in dataclasses.fields(ModelShape)
        if field.name in keys
    }
    # None stands for the preset's in a config, and for derived values in a shape.
    shape |= {"num_kv_heads": run.shape.key_value_heads, "head_dim": run.shape.head_width}
    if not run.is_whole_shape:
        shape |= {"rope_theta": None, "norm_epsilon": None}
    return dataclasses.replace(base, **shape)
