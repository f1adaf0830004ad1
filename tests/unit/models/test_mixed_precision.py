"""Checks the answers to the mixed-precision questions of the course hand-outs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def _accumulate(sum_dtype: torch.dtype, term: Callable[[], torch.Tensor]) -> torch.Tensor:
    total = torch.tensor(0, dtype=sum_dtype)
    for _ in range(1000):
        total += term()
    return total


@pytest.mark.parametrize(
    ("sum_dtype", "term_dtype", "upcast", "printed"),
    [
        (torch.float32, torch.float32, False, 10.0001),
        (torch.float16, torch.float16, False, 9.9531),
        (torch.float32, torch.float16, False, 10.0021),
        (torch.float32, torch.float16, True, 10.0021),
    ],
)
def test_accumulation(
    sum_dtype: torch.dtype, term_dtype: torch.dtype, upcast: bool, printed: float
) -> None:
    def term() -> torch.Tensor:
        value = torch.tensor(0.01, dtype=term_dtype)
        return value.to(torch.float32) if upcast else value

    assert round(_accumulate(sum_dtype, term).item(), 4) == printed


def test_why_the_float16_sum_is_low_and_the_mixed_sums_are_high() -> None:
    hundredth = torch.tensor(0.01, dtype=torch.float16)
    # The term itself has a rounding error: a thousand of it make 10.0021.
    assert hundredth.item() == pytest.approx(0.010002136, abs=1e-9)
    assert 1000 * hundredth.double().item() == pytest.approx(10.0021, abs=1e-4)
    # And in [8, 16) float16 numbers are 2^-7 apart, so each addition there adds 0.0078 instead.
    eight = torch.tensor(8.0, dtype=torch.float16)
    spacing = torch.nextafter(eight, torch.tensor(16.0, dtype=torch.float16)) - eight
    assert spacing.item() == 2**-7
    assert ((eight + hundredth) - eight).item() == 2**-7


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.ln(F.relu(self.fc1(x))))


@pytest.mark.parametrize(
    ("device", "low"),
    [
        ("cpu", torch.bfloat16),
        ("cpu", torch.float16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
    ],
)
def test_what_autocast_computes_in_which_format(device: str, low: torch.dtype) -> None:
    model = ToyModel().to(device)
    seen: dict[str, torch.dtype] = {}
    for name in ("fc1", "ln"):
        model.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.update({name: output.dtype})
        )
    with torch.autocast(device, low):
        logits = model(torch.randn(4, 8, device=device))
        loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long, device=device))
        parameters = {parameter.dtype for parameter in model.parameters()}
    loss.backward()
    assert parameters == {torch.float32}
    assert seen["fc1"] == low
    assert logits.dtype == low
    # The loss is float32: autocast runs cross-entropy in float32 to keep its range.
    assert loss.dtype == torch.float32
    assert {
        parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None
    } == {torch.float32}
    # CUDA's autocast computes layer norm in float32; the CPU's follows its input.
    assert seen["ln"] == (torch.float32 if device == "cuda" else low)
