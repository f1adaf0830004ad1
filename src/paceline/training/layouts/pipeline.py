"""Cuts a model into pipeline stages, each distributed over the ranks of its stage."""

import contextlib
from collections.abc import Iterable

from torch import nn

from paceline.accounting.stages import divide_into_stages
from paceline.models import TransformerLM
from paceline.models.stage import TransformerStage
from paceline.parallel.mesh.apply import apply_layout
from paceline.parallel.mesh.groups import MeshGroups
from paceline.parallel.mesh.pipeline import Context, Loss, Pipeline, ScheduleName
from paceline.training.layouts.initialize import leave_meta_device


def make_pipeline(
    model: TransformerLM,
    groups: MeshGroups,
    *,
    context_length: int,
    num_micro_batches: int,
    loss: Loss,
    schedule: ScheduleName = "1f1b",
    forward_context: Context = contextlib.nullcontext,
    compile_blocks: bool = False,
) -> Pipeline:
    """Returns this rank's stages of a model, with the schedule that runs them.

    Args:
        model: The whole model, with the same weights on all ranks or on the meta device.
        groups: Groups of a layout that can run and has a pipeline.
        context_length: Tokens per sequence, which determine the cost of attention.
        num_micro_batches: Equal parts of a rank's batch.
        loss: Loss of a micro-batch; the loss of a step is their sum.
        schedule: 1f1b, interleaved if the layout says so, or zero_bubble.
        forward_context: Context of forward passes, such as autocast.
        compile_blocks: Whether each block is compiled.
    """
    layout, mesh = groups.layout, groups.pipeline
    assert mesh is not None
    stages = own_stages(model, groups, context_length)
    for stage in stages.values():
        apply_layout(stage, groups, compile_blocks=compile_blocks)
        leave_meta_device(stage, groups.device)
    return Pipeline(
        stages,
        num_stages=layout.pipeline * layout.pipeline_interleave,
        num_micro_batches=num_micro_batches,
        loss=loss,
        group=mesh.get_group(),
        device=groups.device,
        schedule=schedule,
        forward_context=forward_context,
        tied=_end_weight(stages.values()) if model.shape.tied_embeddings else None,
    )


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
