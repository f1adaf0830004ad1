import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.accounting import count_parameters
from paceline.accounting.memory.step import StepPlan, explain_memory, fit_on_device
from paceline.core import BatchShape, find_device, model_preset, precision_preset
from paceline.core.strategies import StrategyName

BATCH = BatchShape(num_sequences=4, context_length=128)
SMALL = model_preset("small")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
@settings(max_examples=25, deadline=None)
@given(gibibytes=st.floats(0.5, 4))
def test_one_rank_fewer_would_not_fit(strategy: StrategyName, gibibytes: float) -> None:
    memory = gibibytes * 2**30
    plan = StepPlan(shape=SMALL, batch=BATCH, strategy=strategy)
    ranks = plan.fewest_ranks(memory)
    if ranks is None:
        assert plan.peak_bytes(2**14) > memory
    else:
        assert plan.peak_bytes(ranks) <= memory
        assert ranks == 1 or plan.peak_bytes(ranks - 1) > memory


def test_what_no_strategy_divides_fits_on_one_rank_or_on_none() -> None:
    states = 16 * count_parameters(SMALL).total
    plan = StepPlan(shape=SMALL, batch=BATCH, strategy="ddp")
    assert plan.fewest_ranks(2 * states) == 1
    assert plan.fewest_ranks(states / 2) is None


def test_the_parts_add_up_and_the_device_is_named() -> None:
    xl = model_preset("xl")
    device = find_device("rtx-3090")
    plan = StepPlan(shape=xl, batch=BATCH, strategy="zero2")
    explanation = explain_memory(plan, 2, device=device)
    values = explanation.values
    for instant in ("after_init", "before_step", "after_step"):
        parts = ("parameters", "gradients", "optimizer_state", "buffers", "activations")
        held = sum(values[f"{instant}_{part}_bytes"] for part in parts)
        assert held == values[f"{instant}_bytes"]
    assert values["before_step_optimizer_state_bytes"] == pytest.approx(
        4 * count_parameters(xl).total, rel=1e-3
    )
    assert plan.peak_bytes(int(values["fewest_ranks"])) <= 24e9
    assert "RTX 3090" in explanation.render()
    too_large = explain_memory(dataclasses.replace(plan, strategy="torch_ddp"), 2, device=device)
    assert "no number of ranks is enough" in too_large.render()


def test_the_verdict_leads_with_the_peak_and_the_capacity() -> None:
    device = find_device("rtx-3090")
    plan = StepPlan(shape=model_preset("xl"), batch=BATCH, strategy="zero2")
    too_large = fit_on_device(plan, 2, device)
    peak = plan.peak_bytes(2)
    fewest = plan.fewest_ranks(24e9)
    assert too_large.name == "does_not_fit"
    assert too_large.figures == {
        "peak_bytes": peak,
        "device_memory_bytes": 24e9,
        "fewest_ranks": fewest,
    }
    assert too_large.message.startswith(f"{peak / 2**30:.1f} of 22.4 GiB")
    assert too_large.remedy == f"it fits from {fewest} ranks on"
    assert fewest is not None
    fits = fit_on_device(plan, fewest, device)
    assert (fits.name, fits.remedy) == ("fits", "")
    never = fit_on_device(dataclasses.replace(plan, strategy="torch_ddp"), 2, device)
    assert "fewest_ranks" not in never.figures
    assert "no number of ranks is enough" in never.remedy
    assert "ZeRO-3" in never.remedy


def test_formats_and_scores_are_in_the_working() -> None:
    plan = StepPlan(shape=SMALL, batch=BATCH, strategy="torch_ddp")
    low = dataclasses.replace(plan, precision=precision_preset("bfloat16"))
    scored = dataclasses.replace(plan, attention="naive")
    # With few tokens, the bf16 copies of weights take more than the bf16 activations save.
    assert plan.peak_bytes(2) < low.peak_bytes(2)
    many = BatchShape(num_sequences=16, context_length=512)
    low_many, plan_many, scored_many = (
        dataclasses.replace(one, batch=many).peak_bytes(2) for one in (low, plan, scored)
    )
    assert low_many < plan_many < scored_many
    explanation = explain_memory(low, 2)
    # Two bytes for every matrix weight, including the head's.
    weights = count_parameters(SMALL).total - 25 * SMALL.d_model - 10_000 * SMALL.d_model
    assert explanation.values["saved_weight_copy_bytes"] == 2 * weights
    assert "autocast to bfloat16" in explanation.render()
    assert "stores all scores" in explain_memory(scored, 2).render()


def test_larger_buckets_take_more_where_they_are_sent_to_owners() -> None:
    plan = StepPlan(shape=SMALL, batch=BATCH, strategy="zero2")
    large = dataclasses.replace(plan, bucket_size_mb=200.0)
    assert large.peak_bytes(2) > plan.peak_bytes(2) + 50 * 2**20
