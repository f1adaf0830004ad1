"""Lower bounds of memory: what a case needs at the very least.

They serve to skip what cannot run, so they leave out whatever an implementation might
avoid. A case above its bound may still run out of memory; a case below it always does.
"""

from paceline.accounting.parameters import count_parameters
from paceline.core.specs import BatchShape, ModelShape, Phase, Precision, bytes_per_element

_ADAM_MOMENTS = 2
_FLOAT32_BYTES = 4


def minimum_step_bytes(
    shape: ModelShape, batch: BatchShape, precision: Precision, phase: Phase
) -> int:
    """Returns what weights and Adam's moments occupy, and the larger of logits and gradients.

    From the second step on, weights and moments are always there. Logits are gone when the last
    gradients appear, and the gradients of the last step when the logits do.

    Args:
        shape: The model's dimensions.
        batch: Sequences of a pass, and their length.
        precision: dtypes of weights, gradients, state and arithmetic.
        phase: forward, forward-backward or train: which parts of a step run.
    """
    num_parameters = count_parameters(shape).total
    resident = bytes_per_element(precision.parameters)
    if phase == "train":
        resident += _ADAM_MOMENTS * bytes_per_element(precision.optimizer_state)
        resident += _FLOAT32_BYTES if precision.master_weights else 0
    gradients = 0 if phase == "forward" else bytes_per_element(precision.gradients)
    logits = batch.tokens_per_pass * shape.vocab_size * bytes_per_element(precision.compute)
    return num_parameters * resident + max(num_parameters * gradients, logits)
