import pytest

from paceline.accounting import count_parameters, minimum_step_bytes
from paceline.core import BatchShape, Precision, model_preset, precision_preset

BATCH = BatchShape(num_sequences=4, context_length=128)
LOGITS = 4 * 128 * 10_000


@pytest.mark.parametrize(
    ("phase", "bytes_per_parameter"), [("forward", 4), ("forward-backward", 8), ("train", 16)]
)
def test_states_by_phase(phase: str, bytes_per_parameter: int) -> None:
    shape = model_preset("2.7B")
    needed = minimum_step_bytes(shape, BATCH, Precision(), phase)  # type: ignore[arg-type]
    assert needed == bytes_per_parameter * count_parameters(shape).total + (
        4 * LOGITS if phase == "forward" else 0
    )


def test_autocast_halves_the_logits_and_no_weights() -> None:
    shape = model_preset("small")
    full = minimum_step_bytes(shape, BATCH, precision_preset("float32"), "forward")
    autocast = minimum_step_bytes(shape, BATCH, precision_preset("bfloat16"), "forward")
    assert full - autocast == 2 * LOGITS


def test_master_weights_cost_four_bytes() -> None:
    shape = model_preset("small")
    precision = Precision(
        parameters="bfloat16", compute="bfloat16", gradients="bfloat16", master_weights=True
    )
    needed = minimum_step_bytes(shape, BATCH, precision, "train")
    assert needed == 16 * count_parameters(shape).total
