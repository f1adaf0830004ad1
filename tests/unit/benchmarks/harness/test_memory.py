import pytest
import torch

from paceline.benchmarks.config import ShapeOverrides, StepSweep
from paceline.benchmarks.harness.measure import step_peaks, storage_bytes
from paceline.benchmarks.step import TrainingStep
from paceline.core.host_memory import reset_resident_peak, resident_peak_bytes
from paceline.core.units import MIB
from paceline.parallel.ranks.hardware import usable_memory_bytes

CPU = torch.device("cpu")


def test_shared_storage_counts_once() -> None:
    base = torch.zeros(100)
    assert storage_bytes([base, base[:10], base.view(10, 10), torch.zeros(5)]) == 420


def test_peaks_are_exact_per_phase() -> None:
    resident = torch.zeros(1000)
    kept: list[torch.Tensor] = []

    def first() -> None:
        kept.append(torch.empty(2 * MIB, dtype=torch.uint8))
        torch.empty(5 * MIB, dtype=torch.uint8)

    def second() -> None:
        kept.append(torch.empty(3 * MIB, dtype=torch.uint8))

    def third() -> None:
        kept.clear()

    peaks = step_peaks(
        CPU, resident_tensors=[resident], phases={"first": first, "second": second, "third": third}
    )
    assert peaks == {"first": 4000 + 7 * MIB, "second": 4000 + 5 * MIB, "third": 4000 + 5 * MIB}


def test_the_resident_peak_follows_and_resets() -> None:
    reset_resident_peak()  # Other tests may have raised it.
    before = resident_peak_bytes()
    block = torch.ones(200 * MIB // 4)
    assert resident_peak_bytes() >= before + 150 * MIB
    del block
    reset_resident_peak()
    assert resident_peak_bytes() < before + 150 * MIB


def test_some_memory_is_usable() -> None:
    usable = usable_memory_bytes(CPU)
    assert usable is not None
    assert usable > 100 * MIB


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
    step = TrainingStep(next(sweep.cases()), CPU)
    parameters = storage_bytes(step.model.parameters())
    step.run()
    memory = step.memory()
    # Weights, gradients and both moments coexist; activations of 8 tokens are small.
    assert copies * parameters < memory["peak_before_optimizer_bytes"] < (copies + 0.6) * parameters
    if phase == "train":
        peak = memory["peak_after_optimizer_bytes"]
        assert 4 * parameters < peak < 5.5 * parameters
