import dataclasses

import pytest
import torch

from paceline.accounting import count_parameters, flops_per_token, minimum_step_bytes
from paceline.benchmarks.config import StepCase, StepSweep
from paceline.benchmarks.harness.measure import storage_bytes
from paceline.benchmarks.options import ShapeOverrides
from paceline.benchmarks.step import TimedStep, measure_step, step_case_fields
from paceline.core import precision_preset
from paceline.core.specs import Phase
from paceline.devices.hardware import HardwareLocation, peak_flops
from paceline.records import find_kind

SWEEP = StepSweep(
    context=(16,),
    batch=2,
    warmup=(1,),
    steps=3,
    shape=ShapeOverrides(num_layers=2, d_model=64, d_ff=128, num_heads=4, vocab_size=50),
)
LOCATION = HardwareLocation(device="cpu", hardware="test", threads=1)


def case_with(**changes: object) -> StepCase:
    return next(SWEEP.cases())._replace(**changes)  # type: ignore[arg-type]


def no_progress(_completed: int, _total: int) -> None:
    pass


@pytest.mark.parametrize(
    ("phase", "laps"),
    [
        ("forward", {"forward_time_s"}),
        ("forward-backward", {"forward_time_s", "backward_time_s"}),
        ("train", {"forward_time_s", "backward_time_s", "optimizer_time_s"}),
    ],
)
def test_each_phase_is_timed_and_adds_up(phase: str, laps: set[str]) -> None:
    metrics = measure_step(case_with(phase=phase), no_progress)
    assert {name for name in metrics if name.endswith("_time_s")} == laps | {"step_time_s"}
    for name in laps:
        assert len(metrics[name].samples) == 3
    for index, step_time in enumerate(metrics["step_time_s"].samples):
        assert step_time == pytest.approx(sum(metrics[name].samples[index] for name in laps))


def test_rates_follow_from_the_step_time() -> None:
    case = case_with(phase="train")
    metrics = measure_step(case, no_progress)
    tokens_per_s = metrics["tokens_per_s"].value
    assert tokens_per_s == pytest.approx(32 / metrics["step_time_s"].value)
    flops = flops_per_token(case.shape, 16)
    assert metrics["model_flops_per_s"].value == pytest.approx(tokens_per_s * flops.model)
    # No peak is documented for this processor, so there is no utilization.
    assert not any("utilization" in name for name in metrics)


def test_memory_after_init_is_the_model() -> None:
    case = case_with()
    metrics = measure_step(case, no_progress)
    tables = 2 * case.shape.max_context_length * case.shape.head_width // 2
    expected = 4 * (count_parameters(case.shape).total + tables)
    assert metrics["memory_after_init_bytes"].value == expected


@pytest.mark.parametrize("phase", ["forward", "forward-backward", "train"])
def test_only_what_was_asked_for_happens(phase: str) -> None:
    step = TimedStep(case_with(phase=phase), torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step.run()
    changed = [
        not torch.equal(old, new) for old, new in zip(before, step.model.parameters(), strict=True)
    ]
    assert all(changed) if phase == "train" else not any(changed)
    has_gradients = [parameter.grad is not None for parameter in step.model.parameters()]
    assert all(has_gradients) if phase == "forward-backward" else not any(has_gradients)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_every_precision_computes_the_same_loss(precision: str) -> None:
    exact = TimedStep(case_with(), torch.device("cpu")).forward()
    loss = TimedStep(case_with(precision=precision), torch.device("cpu")).forward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)


def test_the_same_case_twice_measures_the_same_numbers() -> None:
    losses = [TimedStep(case_with(), torch.device("cpu")).forward().item() for _ in range(2)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("phase", ["forward", "forward-backward", "train"])
@pytest.mark.parametrize("vocab_size", [10, 20_000])
def test_the_lower_bound_of_memory_is_one(phase: Phase, vocab_size: int) -> None:
    shape = dataclasses.replace(case_with().shape, vocab_size=vocab_size)
    case = case_with(phase=phase, shape=shape)
    step = TimedStep(case, torch.device("cpu"))
    step.run()
    peak = max(value for name, value in step.memory().items() if name.startswith("peak"))
    assert minimum_step_bytes(shape, case.batch, precision_preset("float32"), phase) <= peak


def test_the_case_of_the_record_has_every_declared_field() -> None:
    fields = step_case_fields(case_with(), LOCATION)
    kind = find_kind("step")
    assert set(fields) == {*kind.join_key, *kind.method}


def test_utilization_uses_the_peak_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    location = HardwareLocation(device="cuda", hardware="a100-sxm-80gb", threads=1)
    assert peak_flops(location, precision_preset("bfloat16")) == 312e12
    assert peak_flops(location, precision_preset("float32")) == 19.5e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops(location, precision_preset("float32")) == 156e12
    assert peak_flops(LOCATION, precision_preset("float32")) is None


def test_utilization_is_recorded_where_the_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.benchmarks.step.peak_flops", lambda _place, _precision: 1e12)
    (case,) = dataclasses.replace(SWEEP, activation_checkpointing="full").cases()
    metrics = measure_step(case, no_progress)
    full = metrics["model_flops_utilization"].value
    assert full == pytest.approx(metrics["model_flops_per_s"].value / 1e12)
    assert metrics["model_flops_utilization_causal"].value < full
    assert metrics["hardware_flops_utilization"].value > full


@pytest.mark.parametrize(
    ("phase", "copies"), [("forward", 1), ("forward-backward", 2), ("train", 4)]
)
def test_a_later_step_shows_all_states(phase: str, copies: int) -> None:
    sweep = StepSweep(
        phase=(phase,),  # type: ignore[arg-type]
        context=(8,),
        batch=1,
        shape=ShapeOverrides(num_layers=2, d_model=256, d_ff=1024, num_heads=4, vocab_size=100),
    )
    step = TimedStep(next(sweep.cases()), torch.device("cpu"))
    parameters = storage_bytes(step.model.parameters())
    step.run()
    memory = step.memory()
    # Weights, gradients and both moments coexist; activations of 8 tokens are small.
    assert copies * parameters < memory["peak_before_optimizer_bytes"] < (copies + 0.6) * parameters
    if phase == "train":
        peak = memory["peak_after_optimizer_bytes"]
        assert 4 * parameters < peak < 5.5 * parameters
