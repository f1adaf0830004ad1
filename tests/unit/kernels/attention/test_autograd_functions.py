"""Tests both autograd functions against the courses' contract, more strictly than the courses."""

import pytest
import torch

from tests import adapters
from tests.unit.kernels.attention.attention_cases import expected_results


def _function(kind: str) -> type[torch.autograd.Function]:
    if kind == "triton":
        pytest.importorskip("triton")
        return adapters.get_flashattention_autograd_function_triton()
    return adapters.get_flashattention_autograd_function_pytorch()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["pytorch", "triton"])
def test_the_courses_attention(kind: str, is_causal: bool) -> None:
    torch.manual_seed(0)
    device = "cuda" if kind == "triton" and torch.cuda.is_available() else "cpu"
    inputs = [torch.randn(4, 128, 64, device=device, requires_grad=True) for _ in range(3)]
    output_gradient = torch.randn(4, 128, 64, device=device)
    output = _function(kind).apply(*inputs, is_causal)
    saved = [tensor for tensor in output.grad_fn.saved_tensors if tensor.shape == (4, 128)]
    output.backward(output_gradient)
    assert len(saved) == 1
    expected = expected_results(
        tuple(tensor.unsqueeze(1) for tensor in inputs),
        0 if is_causal else None,
        1 / 8,
        output_gradient.unsqueeze(1).double(),
        torch.zeros(4, 1, 128, dtype=torch.float64, device=device),
    )
    results = (output, saved[0], *(tensor.grad for tensor in inputs))
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), wanted.squeeze(1), atol=2e-5, rtol=2e-5)


def test_no_keys_give_zeros_and_no_second_derivative_is_claimed() -> None:
    function = _function("pytorch")
    query = torch.randn(2, 5, 8, requires_grad=True)
    nothing = torch.randn(2, 0, 8)
    assert not function.apply(query, nothing, nothing).any()
    weights = torch.randn(2, 5, 8, requires_grad=True)
    output = function.apply(query, query, query) * weights
    (gradient,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_without_a_mask_said_all_keys_are_visible() -> None:
    inputs = [torch.randn(2, 5, 8) for _ in range(3)]
    function = _function("pytorch")
    assert torch.equal(function.apply(*inputs), function.apply(*inputs, False))
