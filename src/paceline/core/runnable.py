"""The layouts that Paceline's own trainer can run, as used by both planner and trainer.

A purely data-parallel layout runs with any of our strategies. A layout with any other axis, or
with replicas of sharded state, runs on torch's device mesh, which has its own limits.
"""

import dataclasses

from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout
from paceline.core.specs import ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The workload of a layout."""

    shape: ModelShape
    context_length: int
    """Tokens in a sequence."""
    num_micro_batches: int | None = None
    """Micro-batches per step of each data-parallel rank; None if not known yet."""


def needs_mesh(layout: ParallelLayout) -> bool:
    """Returns whether a layout is more than data-parallel or replicates sharded state."""
    is_hybrid = layout.replicate > 1 and layout.sharding != "none"
    return is_hybrid or layout.tensor * layout.context * layout.pipeline > 1


def unsupported_reasons(layout: ParallelLayout, work: Work) -> list[str]:
    """Returns the reasons why a layout cannot run, with figures; empty if it can."""
    return [
        *_refused_techniques(layout),
        *_refused_tensor(layout, work),
        *_refused_context(layout, work),
        *_refused_pipeline(layout, work),
    ]


def require_runnable(layout: ParallelLayout, work: Work, where: str) -> None:
    """Raises a `UsageError`, which names `where` the layout is requested, if it cannot run."""
    if reasons := unsupported_reasons(layout, work):
        raise UsageError(
            f"{where}: {'; '.join(reasons)}; paceline plan search --runnable finds a layout that "
            "runs"
        )


def _refused_techniques(layout: ParallelLayout) -> list[str]:
    reasons = []
    if layout.activation_checkpointing == "selective":
        reasons.append("selective recomputation: blocks are recomputed in full or not at all")
    if layout.sharding != "none" and layout.replicate > 1 and layout.shard * layout.context == 1:
        reasons.append(
            f"replicate {layout.replicate} leaves no ranks to shard {layout.sharding} over; use "
            "replicate 1 to shard, or a strategy without sharding to replicate"
        )
    elif needs_mesh(layout) and layout.sharding == "optimizer":
        reasons.append(
            "ZeRO-1 runs only with data parallelism alone; with other axes use ZeRO-2 (gradients)"
        )
    return reasons


def _refused_tensor(layout: ParallelLayout, work: Work) -> list[str]:
    shape, ranks = work.shape, layout.tensor
    if ranks == 1:
        return []
    sizes = {
        "heads": shape.num_heads,
        "key-value heads": shape.key_value_heads,
        "channels of the feed-forward layer": shape.d_ff,
    }
    if layout.sequence_parallel:
        sizes["tokens of a sequence"] = work.context_length // layout.context
    return [
        f"tensor {ranks} does not divide {size:,} {name}"
        for name, size in sizes.items()
        if size % ranks
    ]


def _refused_context(layout: ParallelLayout, work: Work) -> list[str]:
    parts = 2 * layout.context
    if layout.context == 1 or work.context_length % parts == 0:
        return []
    return [
        f"context {layout.context} needs a context length divisible by {parts}, not "
        f"{work.context_length:,} tokens"
    ]


def _refused_pipeline(layout: ParallelLayout, work: Work) -> list[str]:
    stages, interleave = layout.pipeline, layout.pipeline_interleave
    if stages == 1:
        return ["interleave without a pipeline"] if interleave > 1 else []
    reasons = []
    if work.shape.num_layers < stages * interleave:
        reasons.append(
            f"{stages * interleave} stages (pipeline {stages} with interleave {interleave}) need "
            f"a block each, and the model has {work.shape.num_layers} layers"
        )
    passes = work.num_micro_batches
    if passes is not None and passes < stages:
        reasons.append(
            f"pipeline {stages} needs at least as many micro-batches, and a step has {passes}"
        )
    elif passes is not None and interleave > 1 and passes % stages:
        reasons.append(
            f"interleave {interleave} needs a multiple of {stages} micro-batches, and a step has "
            f"{passes}"
        )
    return reasons
