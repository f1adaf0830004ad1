import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting import count_parameters
from paceline.accounting.memory_plan import explain_memory, fewest_ranks, peak_bytes
from paceline.core import BatchShape, find_device, model_preset
from paceline.core.strategies import StrategyName

BATCH = BatchShape(num_sequences=4, context_length=128)
SMALL = model_preset("small")


@pytest.mark.parametrize("strategy", ["sharded_optimizer", "sharded", "fully_sharded"])
@given(gibibytes=st.floats(0.5, 4))
def test_one_rank_fewer_would_not_fit(strategy: StrategyName, gibibytes: float) -> None:
    memory = gibibytes * 2**30
    ranks = fewest_ranks(SMALL, BATCH, strategy, memory)
    if ranks is None:
        assert peak_bytes(SMALL, BATCH, strategy, 2**14) > memory
    else:
        assert peak_bytes(SMALL, BATCH, strategy, ranks) <= memory
        assert ranks == 1 or peak_bytes(SMALL, BATCH, strategy, ranks - 1) > memory


def test_what_no_strategy_divides_fits_on_one_rank_or_on_none() -> None:
    states = 16 * count_parameters(SMALL).total
    assert fewest_ranks(SMALL, BATCH, "bucketed", 2 * states) == 1
    assert fewest_ranks(SMALL, BATCH, "bucketed", states / 2) is None


def test_the_parts_add_up_and_the_device_is_named() -> None:
    xl = model_preset("xl")
    explanation = explain_memory(xl, BATCH, "sharded", 2, device=find_device("rtx-3090"))
    values = explanation.values
    for instant in ("after_init", "before_step", "after_step"):
        parts = ("parameters", "gradients", "optimizer_state", "buffers", "activations")
        held = sum(values[f"{instant}_{part}_bytes"] for part in parts)
        assert held == values[f"{instant}_bytes"]
    assert values["before_step_optimizer_state_bytes"] == pytest.approx(
        4 * count_parameters(xl).total, rel=1e-3
    )
    assert peak_bytes(xl, BATCH, "sharded", int(values["fewest_ranks"])) <= 24e9
    assert "RTX 3090" in explanation.render()
    too_large = explain_memory(xl, BATCH, "torch_ddp", 2, device=find_device("rtx-3090"))
    assert "no number of ranks is enough" in too_large.render()
