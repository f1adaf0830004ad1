"""Tests the segments of a step against the operators that torch executes."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.accounting import flops_per_token
from paceline.accounting.counts import model_segments
from paceline.accounting.memory.model_states import parameter_sizes
from paceline.core import ModelShape
from paceline.models import TransformerLM, next_token_loss

SHAPES = {
    "plain": ModelShape(vocab_size=300, d_model=64, d_ff=256, num_layers=3, num_heads=4),
    "grouped": ModelShape(
        vocab_size=100, d_model=64, d_ff=160, num_layers=2, num_heads=4, num_kv_heads=2
    ),
    "tied": ModelShape(
        vocab_size=2000, d_model=64, d_ff=128, num_layers=1, num_heads=2, tied_embeddings=True
    ),
}
SEQUENCES, CONTEXT = 3, 24
TOKENS = SEQUENCES * CONTEXT

_MAKE_VIEWS = {
    *("_unsafe_view", "alias", "detach", "expand", "select", "slice", "split"),
    *("squeeze", "t", "transpose", "unsqueeze", "view"),
}
_MULTIPLY = {"mm", "attention", "attention_backward"}


class _Counter(TorchDispatchMode):
    """Counts operators (a view as a third), and elements that elementwise ones read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0.0
        self.elements = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        self.calls += 1 / 3 if name in _MAKE_VIEWS else 1
        if name not in _MAKE_VIEWS | _MULTIPLY:
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            # Counts the rows that are looked up, not the whole table.
            if name == "embedding":
                tensors = tensors[2:] * 2
            self.elements += sum(tensor.numel() for tensor in tensors)
        return result


def _count(shape: ModelShape) -> tuple[_Counter, _Counter]:
    model = TransformerLM(shape, attention="sdpa")
    tokens = torch.randint(shape.vocab_size, (SEQUENCES, CONTEXT))
    with _Counter() as forward:
        loss = next_token_loss(model(tokens), tokens)
    with _Counter() as backward:
        torch.autograd.backward(loss)
    return forward, backward


@pytest.mark.parametrize("name", SHAPES)
def test_segments_hold_all_parameters_in_order(name: str) -> None:
    shape = SHAPES[name]
    sizes = [size for segment in model_segments(shape) for size in segment.parameter_sizes]
    assert sizes == parameter_sizes(shape)
    assert sizes == [parameter.numel() for parameter in TransformerLM(shape).parameters()]


@pytest.mark.parametrize("name", SHAPES)
def test_matmuls_are_those_of_the_operations_per_token(name: str) -> None:
    shape = SHAPES[name]
    weights = sum(
        linear.inputs * linear.outputs
        for segment in model_segments(shape)
        for linear in segment.linears
    )
    attention = 4 * shape.num_layers * shape.attention_width * CONTEXT
    assert 2 * weights + attention == flops_per_token(shape, CONTEXT).forward


@pytest.mark.parametrize("name", SHAPES)
def test_elementwise_passes_are_those_that_torch_makes(name: str) -> None:
    forward, backward = _count(SHAPES[name])
    segments = model_segments(SHAPES[name])
    expected = sum(TOKENS * segment.elements[0] for segment in segments)
    assert expected == pytest.approx(forward.elements, rel=0.05)
    expected = sum(
        TOKENS * segment.elements[1] + segment.backward_fixed_elements for segment in segments
    )
    assert expected == pytest.approx(backward.elements, rel=0.08)


@pytest.mark.parametrize("name", SHAPES)
def test_launches_are_about_those_that_torch_makes(name: str) -> None:
    forward, backward = _count(SHAPES[name])
    segments = model_segments(SHAPES[name])
    assert sum(segment.launches[0] for segment in segments) == pytest.approx(forward.calls, rel=0.1)
    assert sum(segment.launches[1] for segment in segments) == pytest.approx(
        backward.calls, rel=0.1
    )
