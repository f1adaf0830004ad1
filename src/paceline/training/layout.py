"""Derives the parallel layout of a run from its config and world size, or rejects it."""

from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout
from paceline.core.runnable import Work, needs_mesh, require_runnable
from paceline.core.strategies import sharding_of
from paceline.training.config import RunConfig


def layout_of(config: RunConfig, world_size: int) -> ParallelLayout:
    """Returns the parallel layout of a run.

    Args:
        config: The run; `parallel` sizes all axes but one, which takes the remaining ranks.
        world_size: Number of ranks.
    """
    layout = _arranged(config, world_size)
    if not needs_mesh(layout) and layout.pipeline_interleave == 1:
        return layout
    if config.model.hugging_face is not None:
        raise UsageError(
            "parallel.tensor, context, pipeline and replicate are for Paceline's own model, not "
            "for model.hugging_face; leave them at 1"
        )
    if layout.tensor > 1 and config.model.compile_blocks:
        # torch 2.13: in backward, a compiled block passes a plain tensor to DTensor's
        # redistribution.
        raise UsageError(
            f"parallel.tensor {layout.tensor} cannot run with model.compile_blocks: torch.compile "
            "does not return the gradients of DTensors; leave one of them out"
        )
    passes = config.training.num_passes(layout.data_parallel)
    work = Work(
        shape=config.model.shape,
        context_length=config.data.context_length,
        num_micro_batches=passes,
    )
    require_runnable(layout, work, "parallel")
    if layout.pipeline > 1 and config.training.batch_size % (layout.data_parallel * passes):
        raise UsageError(
            f"parallel.pipeline {layout.pipeline} needs micro-batches of equal size, and "
            f"training.batch_size {config.training.batch_size} is not divisible by "
            f"{layout.data_parallel} data-parallel ranks with {passes} micro-batches each; change "
            "training.batch_size or training.micro_batch_size"
        )
    return layout


def _arranged(config: RunConfig, world_size: int) -> ParallelLayout:
    parallel = config.parallel
    sizes = {axis: getattr(parallel, axis) for axis in ("tensor", "context", "pipeline")}
    inner = parallel.tensor * parallel.context * parallel.pipeline * parallel.replicate
    left, remainder = divmod(world_size, inner)
    if remainder:
        axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise UsageError(
            f"parallel: {axes} and replicate {parallel.replicate} need {inner} ranks, but "
            f"{world_size} is not a multiple of that; start a multiple of {inner}"
        )
    sharding = sharding_of(parallel.strategy)
    is_sharded = sharding != "none"
    return ParallelLayout(
        replicate=parallel.replicate if is_sharded else parallel.replicate * left,
        shard=left if is_sharded else 1,
        **sizes,
        sharding=sharding,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_interleave=parallel.interleave,
        activation_checkpointing=config.model.activation_checkpointing,
    )
