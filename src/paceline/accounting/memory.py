"""Lower bounds of memory: what a case needs at the very least.

They serve to skip what cannot run, so they leave out whatever an implementation might
avoid. A case above its bound may still run out of memory; a case below it always does.
"""

from typing import Literal

from paceline.accounting.parameters import count_parameters
from paceline.core.specs import BatchShape, ModelShape, Precision, bytes_per_element

Phase = Literal["forward", "forward-backward", "train"]

_ADAM_MOMENTS = 2
_FLOAT32_BYTES = 4


def minimum_step_bytes(
    shape: ModelShape, batch: BatchShape, precision: Precision, phase: Phase
) -> int:
    """Returns what weights, gradients, Adam's moments and the logits occupy together."""
    num_parameters = count_parameters(shape).total
    per_parameter = bytes_per_element(precision.parameters)
    if phase != "forward":
        per_parameter += bytes_per_element(precision.gradients)
    if phase == "train":
        per_parameter += _ADAM_MOMENTS * bytes_per_element(precision.optimizer_state)
        per_parameter += _FLOAT32_BYTES if precision.master_weights else 0
    states = num_parameters * per_parameter
    logits = batch.tokens_per_pass * shape.vocab_size * bytes_per_element(precision.compute)
    # The optimizer's moments and the logits need not exist at the same instant before the
    # first step, but from the second step on they do.
    return states + logits


def minimum_attention_bytes(
    batch: BatchShape, head_dim: int, element_bytes: int, *, backward: bool
) -> int:
    """Returns what attention that stores its scores needs, one head per sequence.

    Scores and probabilities exist together when softmax is taken; in backward, the
    probabilities, their gradient and that of the scores do.
    """
    scores = batch.num_sequences * batch.context_length**2 * element_bytes
    vectors = batch.tokens_per_pass * head_dim * element_bytes
    if backward:
        return 3 * scores + 8 * vectors
    return 2 * scores + 4 * vectors
