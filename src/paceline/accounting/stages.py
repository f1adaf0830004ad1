"""Assignment of a model's blocks to pipeline stages.

With p ranks and v virtual stages on each, stage s of p v is on rank s mod p. A pipeline is as fast
as its slowest rank, so blocks are assigned one by one to the rank with the least work, where

    work = matmul FLOPs + 64 elements

covers forward and backward of one token through the stage's blocks. The first stage also has the
embedding; the last has the final norm, the head and the loss. Elements are the numbers that
elementwise operations read and write (`paceline.accounting.step_work`). One element takes as long
as 25 to 75 matmul FLOPs on a CPU core, by calibration, and about 600 on an H100 in bf16, by its
data sheet. The factor fits CPUs; on GPUs it underestimates elementwise work.
"""

from collections.abc import Sequence

from paceline.accounting.step_work import ModelSegment, model_segments
from paceline.core.errors import UsageError
from paceline.core.specs import ModelShape

_FLOPS_PER_ELEMENT = 64


def divide_into_stages(
    shape: ModelShape, context_length: int, num_ranks: int, interleave: int = 1
) -> tuple[range, ...]:
    """Returns the blocks of every stage, in model order.

    Args:
        shape: The model's dimensions.
        context_length: Tokens per sequence, which determine the cost of attention.
        num_ranks: Ranks in the pipeline.
        interleave: Virtual stages on each rank.
    """
    num_stages = num_ranks * interleave
    if shape.num_layers < num_stages:
        raise UsageError(
            f"pipeline {num_ranks} with interleave {interleave} needs {num_stages} blocks or more, "
            f"and the model has {shape.num_layers}; take fewer stages"
        )
    embedding, *blocks, norm, head = model_segments(shape)
    per_block = _work(shape, context_length, blocks) / shape.num_layers
    work = [per_block] * num_stages
    work[0] += _work(shape, context_length, [embedding])
    work[-1] += _work(shape, context_length, [norm, head])
    num_blocks = [1] * num_stages

    def load(stage: int) -> tuple[float, float, int]:
        # Ties go to the later stage, which keeps fewer micro-batches in flight.
        return sum(work[stage % num_ranks :: num_ranks]), work[stage], -stage

    for _ in range(shape.num_layers - num_stages):
        stage = min(range(num_stages), key=load)
        num_blocks[stage] += 1
        work[stage] += per_block
    ends = [sum(num_blocks[: stage + 1]) for stage in range(num_stages)]
    return tuple(range(end - number, end) for end, number in zip(ends, num_blocks, strict=True))


def _work(shape: ModelShape, context_length: int, segments: Sequence[ModelSegment]) -> float:
    """Returns the work of segments for one token, in FLOPs, forward and backward."""
    # A causal mask leaves half of the scores; each takes part in two matmuls.
    attention = 12 * shape.attention_width * (context_length + 1) / 2
    total = 0.0
    for segment in segments:
        total += sum(6 * linear.inputs * linear.outputs for linear in segment.linears)
        total += attention if segment.has_attention else 0
        total += _FLOPS_PER_ELEMENT * sum(segment.elements)
    return total
