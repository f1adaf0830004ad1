"""Tests of which parameters an optimizer trains and how, and of learning rates by schedule."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.models import TransformerLM
from paceline.training.config import OptimizerConfig, ScheduleConfig
from paceline.training.optimizers import learning_rate_factor, make_optimizers, set_learning_rate
from tests.unit.training.small_models import SHAPE


def _curve(num_steps: int, **options: object) -> list[float]:
    schedule = ScheduleConfig(**options)  # type: ignore[arg-type]
    return [learning_rate_factor(schedule, step, num_steps) for step in range(num_steps)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert _curve(8, name="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_cosine_falls_to_its_end_with_the_last_step() -> None:
    curve = _curve(101, name="cosine", warmup_steps=1, final_fraction=0.1)
    assert curve[0] == 1
    assert curve[50] == pytest.approx(0.55)
    assert curve[-1] == pytest.approx(0.1)


def test_wsd_is_stable_before_it_decays() -> None:
    curve = _curve(100, name="wsd", warmup_steps=10, decay_fraction=0.2, final_fraction=0)
    assert curve[9:80] == [1.0] * 71
    assert curve[-1] == 0
    assert curve[80] == pytest.approx(0.95)


@given(
    name=st.sampled_from(["cosine", "wsd", "constant"]),
    num_steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    decay=st.floats(0, 1),
    final=st.floats(0, 1),
)
def test_factors_rise_once_and_then_never_again(
    name: str, num_steps: int, warmup: int, decay: float, final: float
) -> None:
    warmup = min(warmup, num_steps)
    curve = _curve(
        num_steps, name=name, warmup_steps=warmup, decay_fraction=decay, final_fraction=final
    )
    assert all(0 <= factor <= 1 + 1e-12 for factor in curve)
    assert curve[:warmup] == sorted(curve[:warmup])
    after = curve[warmup:]
    assert all(first >= second - 1e-12 for first, second in itertools.pairwise(after))


def _names(model: TransformerLM, group: dict[str, Any]) -> set[str]:
    own = {id(parameter) for parameter in group["params"]}
    return {name for name, each in model.named_parameters() if id(each) in own}


def test_adamw_decays_matrices_only() -> None:
    model = TransformerLM(SHAPE)
    config = OptimizerConfig(learning_rate=2e-3, weight_decay=0.3, beta1=0.8, beta2=0.7, epsilon=1)
    (optimizer,) = make_optimizers(config, "ddp", model).values()
    decayed, others = optimizer.param_groups
    norms = {name for name, each in model.named_parameters() if each.ndim < 2}
    assert _names(model, others) == norms
    assert _names(model, decayed) == {name for name, _ in model.named_parameters()} - norms
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    for group in (decayed, others):
        assert (group["lr"], group["betas"], group["eps"]) == (2e-3, (0.8, 0.7), 1)
        assert group["fused"]  # One kernel for all parameters.


def test_muon_trains_the_matrices_of_blocks_and_adamw_all_others() -> None:
    model = TransformerLM(SHAPE)
    model.get_parameter("blocks.0.attention.output.weight").requires_grad_(False)
    config = OptimizerConfig(name="muon", weight_decay=0.3)
    optimizers = make_optimizers(config, "ddp", model)
    (of_muon,) = optimizers["muon"].param_groups
    assert of_muon["weight_decay"] == 0.3
    in_muon = _names(model, of_muon)
    in_adamw = [_names(model, group) for group in optimizers["adamw"].param_groups]
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert in_muon == {
        name for name, each in trained.items() if name.startswith("blocks.") and each.ndim == 2
    }
    assert sorted(itertools.chain(in_muon, *in_adamw)) == sorted(trained)
    with pytest.raises(UsageError, match="muon needs whole matrices on each rank, but fsdp shards"):
        make_optimizers(config, "fsdp", model)


def test_every_group_follows_the_schedule_from_its_own_peak() -> None:
    config = OptimizerConfig(name="muon", learning_rate=1e-3, muon_learning_rate=0.04)
    optimizers = make_optimizers(config, "ddp", TransformerLM(SHAPE))
    for factor in (0.5, 0.25):
        set_learning_rate(optimizers.values(), factor)
        for name, peak in (("muon", 0.04), ("adamw", 1e-3)):
            rates = [group["lr"] for group in optimizers[name].param_groups]
            assert rates == pytest.approx([peak * factor] * len(rates))
