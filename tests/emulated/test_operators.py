"""Operators that torch treats differently on each kind of device: a CPU's numbers, and no race."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = torch.device("emulated", 0)


def _drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def _images() -> Tensor:
    return _drawn(2, 3, 8, 8)


def _sequences() -> Tensor:
    return _drawn(5, 2, 4)


MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), _images()),
    "convolution, channels last": (
        lambda: nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last),
        _images(),
    ),
    "convolution of sequences": (lambda: nn.Conv1d(4, 6, 2, groups=2), _sequences().mT),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), _images()),
    "batch norm": (lambda: nn.BatchNorm2d(3), _images()),
    "batch norm, evaluated": (lambda: nn.BatchNorm2d(3).eval(), _images()),
    "group norm": (lambda: nn.GroupNorm(1, 3), _images()),
    "layer norm": (lambda: nn.LayerNorm(4), _sequences()),
    "layer norm, bf16": (lambda: nn.LayerNorm(4).bfloat16(), _sequences().bfloat16()),
    "RNN": (lambda: nn.RNN(4, 3), _sequences()),
    "LSTM": (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True), _sequences()),
    "LSTM without biases": (lambda: nn.LSTM(4, 3, bias=False), _sequences()),
    "GRU": (lambda: nn.GRU(4, 3, num_layers=2), _sequences()),
    "GRU without biases": (lambda: nn.GRU(4, 3, bias=False), _sequences()),
}


def _passed(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns what both passes compute: output, gradients and statistics."""
    x = x.requires_grad_()
    output = model(x)
    output = output[0] if isinstance(output, tuple) else output
    output.square().sum().backward()
    assert x.grad is not None
    return [output, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]  # type: ignore[list-item]


@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_as_on_a_cpu(name: str, device_module: Any) -> None:
    make, x = MODULES[name]
    torch.manual_seed(0)
    model = make()
    ours = copy.deepcopy(model).to(DEVICE)
    given = x.clone().to(DEVICE)
    device_module.clear()
    with device_module.forbidden_synchronizations():
        found = _passed(ours, given)
    assert not device_module.hazards()
    for own, expected in zip(found, _passed(model, x.clone()), strict=True):
        assert own.device == DEVICE
        torch.testing.assert_close(own.cpu(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.l1_loss, F.huber_loss])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_are_those_of_a_cpu(loss: Callable[..., Tensor], reduction: str) -> None:
    found = []
    for device in (torch.device("cpu"), DEVICE):
        x, target = _drawn(4, 3).to(device).requires_grad_(), torch.ones(4, 3, device=device)
        value = loss(x, target, reduction=reduction)
        value.sum().backward()
        assert x.grad is not None
        found.append((value.cpu(), x.grad.cpu()))
    torch.testing.assert_close(*found)


def test_complex_numbers_are_read_as_they_are_kept() -> None:
    numbers = torch.complex(_drawn(3, 4), _drawn(3, 4).flip(0))
    own = numbers.to(DEVICE)
    for change in (
        torch.conj,
        lambda z: z.conj().imag,  # Negated without a copy.
        lambda z: z.conj().mT @ z,
        lambda z: torch.view_as_complex(torch.view_as_real(z)[:, :2]),
        lambda z: z.conj().to(torch.complex128),
    ):
        torch.testing.assert_close(change(own).cpu(), change(numbers))
    torch.testing.assert_close(numbers.conj().to(DEVICE).cpu(), numbers.conj())
    torch.testing.assert_close(numbers.conj().imag.to(DEVICE).cpu(), numbers.conj().imag)


def test_parts_of_complex_numbers_are_views() -> None:
    own = torch.zeros(3, dtype=torch.complex64, device=DEVICE)
    own.imag.fill_(2)
    torch.view_as_real(own)[1, 0] = 5
    own.view(torch.int64)[2] = 0
    assert own.tolist() == [2j, 5 + 2j, 0]


def test_gradients_of_rows_are_sparse() -> None:
    tables = [nn.Embedding(7, 3, sparse=True).to(device) for device in ("cpu", DEVICE)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        rows = torch.tensor([1, 2, 2, 5], device=table.weight.device)
        table(rows).square().sum().backward()
    expected, own = (table.weight.grad for table in tables)
    assert expected is not None
    assert own is not None
    assert own.layout == torch.sparse_coo
    assert own.device == DEVICE
    for part in (torch.Tensor._indices, torch.Tensor._values):
        torch.testing.assert_close(part(own).cpu(), part(expected))


def test_inference_mode_computes_in_every_stream(device_module: Any) -> None:
    model, x = nn.Linear(3, 3).to(DEVICE), _drawn(2, 3)
    other = torch.Stream(DEVICE)
    other.wait_stream(torch.accelerator.current_stream(DEVICE))
    with torch.inference_mode(), other:
        found = model(x.to(DEVICE)).mul_(2)
        found[0] = 0
    torch.accelerator.current_stream(DEVICE).wait_stream(other)
    expected = 2 * model.cpu()(x)
    torch.testing.assert_close(found[1].cpu(), expected[1])
    assert not found[0].any()
    assert not device_module.hazards()
