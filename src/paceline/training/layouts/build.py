"""Lays a model over a mesh: cuts it into stages, each distributed over its stage's ranks."""

import contextlib

import torch

from paceline.core.plan import ParallelLayout
from paceline.models import TransformerLM
from paceline.models.stage import TransformerStage
from paceline.parallel import Session
from paceline.parallel.mesh.apply import apply_layout
from paceline.parallel.mesh.groups import MeshGroups
from paceline.parallel.mesh.loss import summed_loss
from paceline.parallel.mesh.pipeline import Context, Loss, Pipeline, ScheduleName
from paceline.training.config import RunConfig
from paceline.training.layouts.initialize import draw_parts, leave_meta_device
from paceline.training.layouts.laid_out import LaidOut
from paceline.training.layouts.pipeline import make_pipeline
from paceline.training.steps.precision import autocast


def lay_out(
    config: RunConfig, session: Session, model: TransformerLM, layout: ParallelLayout
) -> tuple[TransformerLM | TransformerStage, LaidOut]:
    """Returns this rank's part of a model, and the mesh that the model is laid over.

    Args:
        config: The run.
        session: Distributed session of this rank.
        model: On the meta device, because the whole model may not fit on a rank.
        layout: A layout that can run.
    """
    groups = MeshGroups(layout, session.rank, session.world_size, session.device)
    # With this scale, averaging gradients over ranks yields the mean over all tokens.
    scale = groups.gradient_ranks / config.tokens_per_step
    pipeline = place_model(
        model,
        groups,
        context_length=config.data.context_length,
        num_micro_batches=config.training.num_passes(groups.data_ranks),
        loss=lambda logits, targets: summed_loss(logits, targets) * scale,
        seed=config.training.seed,
        forward_context=lambda: autocast(config.training.precision, session.device),
        compile_blocks=config.model.compile_blocks,
    )
    laid_out = LaidOut(
        groups=groups, pipeline=pipeline, vocab_size=model.shape.vocab_size, loss_scale=scale
    )
    if pipeline is None:
        return model, laid_out
    own = [stage.get_submodule("blocks") for stage in pipeline.stages.values()]
    numbers = [int(name) for blocks in own for name, _ in blocks.named_children()]
    return TransformerStage(model, numbers, has_embedding=pipeline.tied is not None), laid_out


def place_model(
    model: TransformerLM,
    groups: MeshGroups,
    *,
    context_length: int,
    num_micro_batches: int,
    loss: Loss,
    seed: int,
    schedule: ScheduleName = "1f1b",
    forward_context: Context = contextlib.nullcontext,
    compile_blocks: bool = False,
) -> Pipeline | None:
    """Lays a model over its ranks and draws its weights; returns the pipeline, if there is one.

    Args:
        model: On the meta device. Without a pipeline, it is reduced in place to this rank's part.
        groups: Groups of a layout that can run.
        context_length: Tokens per sequence.
        num_micro_batches: Equal parts of a rank's batch.
        loss: Loss of a micro-batch, for a pipeline.
        seed: Seed of the weights, which are the same under every layout and in a single process.
        schedule: Schedule of a pipeline.
        forward_context: Context of a pipeline's forward passes.
        compile_blocks: Whether each block is compiled.
    """
    pipeline = None
    if groups.pipeline is None:
        apply_layout(model, groups, compile_blocks=compile_blocks)
        leave_meta_device(model, groups.device)
    else:
        pipeline = make_pipeline(
            model,
            groups,
            context_length=context_length,
            num_micro_batches=num_micro_batches,
            loss=loss,
            schedule=schedule,
            forward_context=forward_context,
            compile_blocks=compile_blocks,
        )
    torch.manual_seed(seed)
    draw_parts(model)
    return pipeline
