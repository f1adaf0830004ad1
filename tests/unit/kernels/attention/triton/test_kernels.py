"""Tests the Triton kernels, interpreted if there is no GPU, against the formula in float64."""

# The interpreter must be enabled before a kernel is defined.
from tests.unit.kernels.attention.triton.interpreter import DEVICE, triton

# isort: split

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.kernels.attention.layout import BackwardInputs, ForwardInputs
from paceline.kernels.attention.triton import backend, launch
from paceline.kernels.attention.triton.backend import triton_backward, triton_forward
from paceline.kernels.attention.triton.tile_sizes import Tiling, Tilings

SQUARE = Tilings(*[Tiling(16, 16, 4, 1)] * 3)
OBLONG = Tilings(Tiling(16, 32, 4, 1), Tiling(16, 32, 4, 1), Tiling(32, 16, 4, 1))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("plain", "tokens", "columns", "sliced", "expanded")
ROUNDING = torch.finfo(torch.float32).eps

# Rows of a tile beyond the last key may overflow: they are never read, but NumPy would warn.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (1, 1)
    """Number of heads of queries, and of keys and values."""
    lengths: tuple[int, int] = (16, 16)
    """Number of queries, and of keys."""
    head_dim: int = 16
    diagonal: int | None = None
    scale: float = 0.3
    batch: int = 1
    layouts: tuple[str, str, str, str] = ("plain",) * 4
    """Memory layouts of query, key, value, and the output's gradient."""
    has_lse_gradient: bool = True
    tilings: Tilings = SQUARE


def _lay_out(tensor: Tensor, layout: str) -> Tensor:
    if layout == "tokens":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "columns":
        return tensor.mT.contiguous().mT
    if layout == "sliced":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), float("nan"))
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if layout == "expanded":
        return tensor[:1, :, :1].expand(tensor.shape)
    return tensor


def _inputs(case: Case) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Returns query, key and value, and the gradients of output and log-sum-exp."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int, layout: str) -> Tensor:
        shape = (case.batch, heads, length, case.head_dim)
        tensor = torch.randn(shape, generator=generator).to(DEVICE, case.dtype)
        return _lay_out(tensor, layout)

    many, few = case.heads
    num_queries, num_keys = case.lengths
    query = draw(many, num_queries, case.layouts[0])
    key = draw(few, num_keys, case.layouts[1])
    value = draw(few, num_keys, case.layouts[2])
    output_gradient = draw(many, num_queries, case.layouts[3])
    lse_gradient = torch.randn(query.shape[:-1], generator=generator).to(DEVICE)
    if not case.has_lse_gradient:
        lse_gradient.zero_()
    return (query, key, value), output_gradient, lse_gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    output: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]
    """Gradients of query, key and value."""


def _weights(query: Tensor, key: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Returns softmax and log-sum-exp, which are 0 and -inf for queries without visible keys."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    scores = scores.to(torch.promote_types(query.dtype, torch.float32)) * case.scale
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=DEVICE)
    if case.diagonal is not None:
        hidden = ~torch.ones_like(hidden).tril(case.diagonal)
    blind = hidden.all(-1)
    scores = scores.masked_fill(hidden & ~blind[:, None], float("-inf"))
    weights = scores.softmax(-1).masked_fill(blind[:, None], 0.0)
    return weights, scores.logsumexp(-1).masked_fill(blind, float("-inf"))


def _formula(
    inputs: tuple[Tensor, ...],
    output_gradient: Tensor,
    lse_gradient: Tensor,
    case: Case,
    dtype: torch.dtype,
) -> Results:
    """Computes matmuls in `dtype`, and softmax in float32 or wider."""
    query, key, value = leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in inputs]
    group = query.shape[1] // key.shape[1]
    weights, lse = _weights(query, key, case)
    output = weights.to(dtype) @ value.repeat_interleave(group, 1)
    gradients = torch.autograd.grad(
        (output, lse), leaves, (output_gradient.to(output.dtype), lse_gradient.to(lse.dtype))
    )
    return Results(output=output.detach(), lse=lse.detach(), gradients=gradients)


def _run(
    inputs: tuple[Tensor, Tensor, Tensor],
    output_gradient: Tensor,
    lse_gradient: Tensor | None,
    case: Case,
) -> Results:
    forward = ForwardInputs(*inputs, case.diagonal, case.scale)
    output, lse = triton_forward(forward, case.tilings)
    backward = BackwardInputs(
        *(*inputs, case.diagonal, case.scale), *(output, lse, output_gradient, lse_gradient)
    )
    gradients = triton_backward(backward, case.tilings)
    return Results(output=output, lse=lse, gradients=gradients)


def _slack(
    inputs: tuple[Tensor, ...], output_gradient: Tensor, lse_gradient: Tensor, case: Case
) -> dict[str, float]:
    """Returns each result's absolute tolerance, needed where the usual error is small by luck.

    Where terms cancel, a float32 sum is wrong by a few units in the last place of the terms, not of
    the sum. Eight units are allowed, because GPUs compute exponentials to about two. The error of a
    score is the relative error of its weight, so it scales everything computed from weights. In
    addition, backward starts from the stored output: the effect of its rounding on the gradients of
    query and key is part of the method.
    """
    group = case.heads[0] // case.heads[1]
    query, key, value = (tensor.double() for tensor in inputs)
    weights, _ = _weights(query, key, case)
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    upstream = output_gradient.double()
    output = weights @ value
    lost = (upstream * (output.to(case.dtype) - output)).sum(-1, keepdim=True).abs()
    query, key, value, upstream = (tensor.abs() for tensor in (query, key, value, upstream))
    output = weights @ value
    delta = (upstream * output).sum(-1, keepdim=True) + lse_gradient.double().abs()[..., None]
    terms = weights * (upstream @ value.mT + delta)

    def largest(of_heads: Tensor, *, shared: bool) -> float:
        return float((of_heads.unflatten(1, (-1, group)).sum(2) if shared else of_heads).max())

    scale = abs(case.scale)
    units = 8 * ROUNDING * (1 + scale * float((query @ key.mT).max()))
    score_gradient = scale * (units * terms + 3 * weights * lost)
    return {
        "lse": units,
        "output": units * largest(output, shared=False),
        "query": largest(score_gradient @ key, shared=False),
        "key": largest(score_gradient.mT @ query, shared=True),
        "value": units * largest(weights.mT @ upstream, shared=True),
    }


def _check(case: Case) -> None:
    inputs, output_gradient, lse_gradient = _inputs(case)
    exact = _formula(inputs, output_gradient, lse_gradient, case, torch.float64)
    usual = _formula(inputs, output_gradient, lse_gradient, case, case.dtype)
    ours = _run(inputs, output_gradient, lse_gradient if case.has_lse_gradient else None, case)
    slack = _slack(inputs, output_gradient, lse_gradient, case)
    blind = exact.lse == float("-inf")
    assert torch.equal(ours.lse == float("-inf"), blind)
    assert not ours.output[blind].any()
    assert not ours.gradients[0][blind].any()
    sighted = [results.lse[~blind] for results in (ours, usual, exact)]
    # Scores are float32 for every input dtype, so log-sum-exp must be accurate to float32.
    _require_close("lse", *sighted, factor=0, slack=slack["lse"])
    outputs = ours.output, usual.output, exact.output
    _require_close("output", *outputs, factor=2, slack=slack["output"])
    for name, *gradients in zip(
        ("query", "key", "value"), ours.gradients, usual.gradients, exact.gradients, strict=True
    ):
        _require_close(name, *gradients, factor=3, slack=slack[name])


def _require_close(
    name: str, ours: Tensor, usual: Tensor, exact: Tensor, *, factor: int, slack: float
) -> None:
    assert ours.dtype == usual.dtype
    if not exact.numel():
        return
    error, usual_error = (float((tensor - exact).abs().max()) for tensor in (ours, usual))
    # Storing the largest number costs half a unit in its last place.
    stored = float(exact.abs().max()) * torch.finfo(ours.dtype).eps / 2
    allowed = factor * usual_error + stored + slack
    assert error <= allowed, f"{name}: error {error}, usual {usual_error}, allowed {allowed}"


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    length = st.sampled_from([1, 15, 16, 17, 32, 33])
    layout = st.sampled_from(LAYOUTS)
    return Case(
        dtype=draw(st.sampled_from(DTYPES)),
        heads=draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (4, 2)])),
        lengths=(draw(length), draw(length)),
        head_dim=draw(st.sampled_from([3, 8, 16, 20, 33])),
        diagonal=draw(st.none() | st.integers(-34, 34)),
        scale=draw(st.sampled_from([0.3, 1.0, 0.0, -0.5])),
        layouts=(draw(layout), draw(layout), draw(layout), draw(layout)),
        has_lse_gradient=draw(st.booleans()),
        tilings=draw(st.sampled_from([SQUARE, OBLONG])),
    )


# Shrinking a failure would take minutes in the interpreter.
@settings(max_examples=20, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(_cases())
def test_any_shape(case: Case) -> None:
    _check(case)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16],
    ids=str,
)
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(33, 33), diagonal=0, heads=(4, 2), batch=2),
        Case(lengths=(40, 17), diagonal=0),
        Case(lengths=(33, 17), diagonal=-16, heads=(2, 2), head_dim=20),
        Case(lengths=(17, 50), diagonal=33, layouts=("tokens",) * 4, tilings=OBLONG),
        Case(lengths=(50, 17), diagonal=-33, layouts=("columns",) * 4, tilings=OBLONG),
        Case(lengths=(32, 64), heads=(2, 2), layouts=("sliced",) * 4),
        Case(lengths=(33, 16), heads=(3, 1), diagonal=0, layouts=("expanded",) * 4),
        Case(lengths=(1, 1), head_dim=1),
        Case(lengths=(20, 20), diagonal=-20),
        Case(lengths=(20, 20), diagonal=-(2**31)),
        Case(lengths=(20, 20), diagonal=10**12),
        Case(lengths=(17, 17), diagonal=0, scale=0.0),
        Case(lengths=(33, 33), diagonal=0, scale=-1.0),
        Case(lengths=(17, 17), diagonal=0, head_dim=130),
        Case(lengths=(17, 17), head_dim=256, has_lse_gradient=False),
    ],
    ids=lambda case: f"{case.lengths}-{case.diagonal}-{case.head_dim}-{case.layouts[0]}",
)
def test_hard_cases(case: Case, dtype: torch.dtype) -> None:
    _check(dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_huge_scores(logit: float, dtype: torch.dtype) -> None:
    # Keys beyond the last have a score of zero: unless hidden, they would dominate or overflow.
    query = torch.full((1, 1, 17, 16), 100.0, dtype=dtype, device=DEVICE)
    key = query * (1 if logit > 0 else -1)
    value, output_gradient = torch.randn(2, 1, 1, 17, 16, device=DEVICE).to(dtype)
    case = Case(dtype=dtype, lengths=(17, 17), scale=1 / 16)
    ours = _run((query, key, value), output_gradient, None, case)
    exact = torch.full_like(ours.lse, logit + torch.tensor(17.0).log().item())
    torch.testing.assert_close(ours.lse, exact, rtol=1e-7, atol=0)
    mean = value.double().mean(2, keepdim=True).to(dtype).expand_as(value)
    torch.testing.assert_close(ours.output, mean)
    # A log-sum-exp of 10^4 is stored to within 0.0005, so weights may be wrong by that much.
    of_value = output_gradient.double().sum(2, keepdim=True).expand_as(value) / 17
    coarse = max(1e-3, torch.finfo(dtype).eps)
    torch.testing.assert_close(ours.gradients[2].double(), of_value, rtol=coarse, atol=coarse)
    assert all(gradient.isfinite().all() for gradient in ours.gradients)


@pytest.mark.parametrize("tilings", [SQUARE, OBLONG])
def test_backward_is_the_same_to_the_bit(tilings: Tilings) -> None:
    case = Case(lengths=(33, 40), heads=(4, 2), diagonal=3, tilings=tilings)
    first, second = (_run(*_inputs(case), case) for _ in range(2))
    for one, other in zip(first.gradients, second.gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs programs that run at the same time")
def test_backward_of_many_tiles_is_the_same_to_the_bit() -> None:
    inputs = [torch.randn(4, 16, 4096, 64, device=DEVICE).to(torch.bfloat16) for _ in range(4)]
    query, key, value, output_gradient = inputs
    output, lse = triton_forward(ForwardInputs(query, key, value, 0, 0.125))
    backward = BackwardInputs(query, key, value, 0, 0.125, output, lse, output_gradient, None)
    first, second = (triton_backward(backward) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_what_arrives_for_a_blind_query_changes_nothing() -> None:
    case = Case(lengths=(20, 20), diagonal=-5)
    inputs, output_gradient, lse_gradient = _inputs(case)
    expected = _run(inputs, output_gradient, lse_gradient, case)
    lse_gradient[..., :5] = float("nan")
    ours = _run(inputs, output_gradient, lse_gradient, case)
    for one, other in zip(ours.gradients, expected.gradients, strict=True):
        assert torch.equal(one, other)


def test_results_lie_where_the_contract_says() -> None:
    case = Case(lengths=(17, 20), heads=(4, 2), batch=2, layouts=("tokens",) * 4)
    ours = _run(*_inputs(case), case)
    query, key, value = _inputs(case)[0]
    assert ours.output.stride() == torch.empty_like(query).stride()
    assert ours.lse.is_contiguous()
    for gradient, tensor in zip(ours.gradients, (query, key, value), strict=True):
        assert gradient.shape == tensor.shape
        assert gradient.transpose(1, 2).is_contiguous()


def test_offsets_of_more_than_32_bits() -> None:
    # 300 rows so far apart that the last tiles begin beyond 2^31 elements; few pages are touched.
    row_stride = 2**23 - 64
    try:
        memory = torch.empty(300 * row_stride, dtype=torch.float16, device=DEVICE)
    except (RuntimeError, MemoryError):
        pytest.skip("no room for 5 GB of addresses")
    far = memory.as_strided((1, 1, 300, 16), (1, 1, row_stride, 1))
    near = torch.randn(1, 1, 300, 16, device=DEVICE).to(torch.float16)
    far.copy_(near)
    key, value = torch.randn(2, 1, 1, 16, 16, device=DEVICE).to(torch.float16)
    expected = triton_forward(ForwardInputs(near, key, value, None, 1.0), SQUARE)
    results = triton_forward(ForwardInputs(far, key, value, None, 1.0), SQUARE)
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, other)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> None:
        query = torch.empty(shape, dtype=dtype, **options)
        triton_forward(ForwardInputs(query, query, query, None, 1.0), SQUARE)

    with pytest.raises(UsageError, match="float64"):
        attend((1, 1, 16, 16), torch.float64)
    with pytest.raises(UsageError, match="up to 256 numbers, got 257"):
        attend((1, 1, 16, 257))
    far = torch.empty(1, 1, 2**23, 16, device="meta").as_strided((1, 1, 256, 16), (1, 1, 2**23, 1))
    inputs = ForwardInputs(far, far, far, None, 1.0)
    with pytest.raises(UsageError, match="rows of query lie too far apart"):
        launch.forward_launch(inputs, (far, far[..., 0]), SQUARE.forward)
    compiled = triton.JITFunction(_run)
    monkeypatch.setattr(backend, "attention_forward_kernel", compiled)
    with pytest.raises(UsageError, match=r'on cpu; use backend="sdpa" or "tiled"'):
        attend((1, 1, 16, 16))
