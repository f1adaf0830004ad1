"""Tests the CPU backends against the formula, and their plans of tiles and blocks."""

import itertools

import jaxtyping
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.kernels.attention import tiled
from paceline.kernels.attention.layout import BackwardInputs, ForwardInputs, empty_lse, empty_output
from paceline.kernels.attention.op import find_backend
from paceline.kernels.attention.sdpa import plan_blocks
from paceline.kernels.attention.tiled import plan_tiles
from tests.unit.kernels.attention.attention_cases import Case, cases, expected_results

BACKENDS = ["sdpa", "tiled"]
SEVERAL_TILES = Case(
    batch=2, kv_heads=3, group=4, num_queries=300, num_keys=700, head_dim=5, diagonal=400
)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "_TILE_QUERIES", 4)
    monkeypatch.setattr(tiled, "_TILE_SCORES", 4 * 4 * 3)
    monkeypatch.setattr(tiled, "_TILE_HEADS", 4)


def _assert_right(backend: str, case: Case, with_lse_gradient: bool) -> None:
    inputs = case.inputs()
    scale = case.scale
    output_gradient = torch.randn_like(inputs[0])
    lse_gradient = torch.randn(inputs[0].shape[:-1], dtype=torch.float64) * with_lse_gradient
    expected = expected_results(inputs, case.diagonal, scale, output_gradient, lse_gradient)
    forward, backward = find_backend(backend)
    output, lse = forward(ForwardInputs(*inputs, case.diagonal, scale))
    given_lse_gradient = lse_gradient if with_lse_gradient else None
    gradients = backward(
        BackwardInputs(
            *(*inputs, case.diagonal, scale), *(output, lse, output_gradient, given_lse_gradient)
        )
    )
    for result, wanted in zip((output, lse, *gradients), expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=1e-9 * case.magnitude, rtol=1e-9)
    assert output.stride() == empty_output(inputs[0]).stride()
    assert lse.stride() == empty_lse(inputs[0], backend).stride()
    for gradient in gradients:
        assert gradient.transpose(1, 2).is_contiguous()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(case=cases(), with_lse_gradient=st.booleans())
@example(case=Case(num_queries=9, num_keys=3, diagonal=-6), with_lse_gradient=False)
@example(case=Case(num_queries=1, num_keys=9, diagonal=8), with_lse_gradient=False)
@example(case=Case(num_queries=4, num_keys=4, diagonal=-4), with_lse_gradient=True)
def test_every_backend_equals_the_formula(
    backend: str, case: Case, with_lse_gradient: bool
) -> None:
    _assert_right(backend, case, with_lse_gradient)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("diagonal", [None, 0, 400, -200])
def test_long_sequences_equal_the_formula(backend: str, diagonal: int | None) -> None:
    case = Case(**{**vars(SEVERAL_TILES), "diagonal": diagonal})
    _assert_right(backend, case, with_lse_gradient=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lower_formats_err_no_more_than_twice_what_torch_does(
    backend: str, dtype: torch.dtype
) -> None:
    case = Case(kv_heads=2, group=2, num_queries=130, num_keys=150, head_dim=32, diagonal=20)
    inputs = case.inputs(dtype)
    output_gradient = torch.randn(inputs[0].shape).to(dtype)
    nothing = torch.zeros(inputs[0].shape[:-1], dtype=torch.float64)
    expected = expected_results(inputs, 20, 0.2, output_gradient.double(), nothing)
    low = [tensor.detach().requires_grad_() for tensor in inputs]
    keys, values = (tensor.repeat_interleave(2, dim=1) for tensor in low[1:])
    scores = (low[0] @ keys.transpose(-2, -1) * 0.2).masked_fill(
        torch.ones(130, 150, dtype=torch.bool).triu(21), float("-inf")
    )
    torch_output = torch.softmax(scores.float(), -1).to(dtype) @ values
    torch_gradients = torch.autograd.grad(torch_output, low, output_gradient)

    forward, backward = find_backend(backend)
    output, lse = forward(ForwardInputs(*inputs, 20, 0.2))
    gradients = backward(BackwardInputs(*inputs, 20, 0.2, output, lse, output_gradient, None))

    def error(result: torch.Tensor, wanted: torch.Tensor) -> float:
        return (result.double() - wanted).abs().max().item()

    assert error(output, expected.output) <= 2 * error(torch_output, expected.output)
    assert error(lse, expected.lse) < 1e-4
    for gradient, of_torch, wanted in zip(gradients, torch_gradients, expected[2:], strict=True):
        assert error(gradient, wanted) <= 3 * error(of_torch, wanted)
        assert gradient.dtype == dtype


def _visible(num_queries: int, num_keys: int, diagonal: int | None) -> set[tuple[int, int]]:
    return {
        (query, key)
        for query, key in itertools.product(range(num_queries), range(num_keys))
        if diagonal is None or key <= query + diagonal
    }


lengths = st.integers(1, 40)
diagonals = st.none() | st.integers(-45, 45)


@pytest.mark.usefixtures("small_tiles")
@given(lengths, lengths, st.integers(1, 30), diagonals)
@settings(deadline=None)
def test_tiles_cover_what_is_visible_once(
    num_queries: int, num_keys: int, num_heads: int, diagonal: int | None
) -> None:
    visible = _visible(num_queries, num_keys, diagonal)
    covered: list[tuple[int, int]] = []
    for tiles in plan_tiles(num_queries, num_keys, num_heads, diagonal):
        assert len({tile[:2] for tile in tiles}) == 1
        for tile in tiles:
            pairs = set(
                itertools.product(
                    range(tile.first_query, tile.end_query), range(tile.first_key, tile.end_key)
                )
            )
            assert pairs & visible, "a tile without anything to see"
            covered += pairs
    assert len(covered) == len(set(covered))
    assert visible <= set(covered)


@given(lengths, lengths, diagonals)
def test_blocks_are_exactly_what_is_visible(
    num_queries: int, num_keys: int, diagonal: int | None
) -> None:
    seen = [
        (query, key)
        for block in plan_blocks(num_queries, num_keys, diagonal)
        for query in range(block.first_query, num_queries)
        for key in range(block.first_key, block.end_key)
        if not block.causal or key - block.first_key <= query - block.first_query
    ]
    assert len(seen) == len(set(seen))
    assert set(seen) == _visible(num_queries, num_keys, diagonal)


def test_shapes_of_the_inputs_are_checked_in_tests() -> None:
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    ForwardInputs(query, key, key, None, 1.0)
    with pytest.raises(jaxtyping.TypeCheckError, match="key"):
        ForwardInputs(query, key[..., :2], key, None, 1.0)
