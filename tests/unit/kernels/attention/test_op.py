"""Tests of the public function and its operators: integration with torch, and errors."""

import importlib.util
import itertools
import pathlib
import sys
from typing import Any, Literal

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import ShapeError, UsageError
from paceline.kernels import explain_backend, flash_attention, resolve_implementation
from paceline.kernels.attention.api import AttentionBackend, _torch_attention, triton_obstacle
from paceline.kernels.attention.layout import causal_diagonal
from paceline.kernels.attention.op import attention_backward_op, attention_op
from paceline.kernels.attention.self_test import objection_to_triton
from tests.unit.kernels.attention.attention_cases import Case, expected_results

Backend = Literal["sdpa", "tiled"]
BACKENDS: tuple[Backend, ...] = ("sdpa", "tiled")
CASES = [
    Case(batch=2, group=2, num_queries=5, num_keys=5, head_dim=2, diagonal=0),
    Case(num_queries=4, num_keys=7, head_dim=3, diagonal=None),
    Case(kv_heads=2, num_queries=3, num_keys=7, diagonal=4, layout="dims"),
    Case(batch=2, kv_heads=2, num_queries=7, num_keys=4, diagonal=-3, layout="tokens"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_functions_own(backend: Backend, case: Case) -> None:
    inputs = [tensor.requires_grad_() for tensor in case.inputs()]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        output, lse = attention_op(query, key, value, case.diagonal, 0.3, backend)
        return output, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
@pytest.mark.parametrize(
    "case", [*CASES[:1], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_torch_finds_no_fault_with_the_operators(backend: str, case: Case) -> None:
    _require(backend)
    inputs = [tensor.to(_device(backend)).requires_grad_() for tensor in case.inputs(torch.float32)]
    options = (case.diagonal, 0.3, backend)
    torch.library.opcheck(attention_op, (*inputs, *options))
    with torch.no_grad():
        output, lse = attention_op(*inputs, *options)
    for lse_gradient in (None, torch.zeros_like(lse)):
        arguments = (torch.ones_like(output), lse_gradient, *inputs, output, lse, *options)
        torch.library.opcheck(
            attention_backward_op, tuple(_detached(argument) for argument in arguments)
        )


def _require(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")


def _device(backend: str) -> str:
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def _detached(argument: Any) -> Any:
    return argument.detach() if isinstance(argument, Tensor) else argument


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "align"),
    [
        ("sdpa", "top_left"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product([*BACKENDS, "triton"], ["top_left", "bottom_right"])
            if case != ("sdpa", "top_left")
        ),
    ],
)
def test_a_compiled_graph_is_whole_and_takes_any_length(
    backend: AttentionBackend, align: Literal["top_left", "bottom_right"]
) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = flash_attention(
            query * 2, key, value, causal=True, causal_align=align, backend=backend
        )
        return mixed.transpose(1, 2).flatten(2)

    _require(backend)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for num_queries, num_keys in ((8, 12), (11, 17), (20, 23), (33, 40)):
        drawn = Case(2, 2, 2, num_queries, num_keys, 16).inputs(torch.float32)
        inputs = [tensor.to(_device(backend)).requires_grad_() for tensor in drawn]
        results, expected = compiled(*inputs), attend(*inputs)
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(
            torch.autograd.grad(results.square().sum(), inputs),
            torch.autograd.grad(expected.square().sum(), inputs),
        )
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float16, False),
        pytest.param(torch.float16, True, marks=pytest.mark.slow),
    ],
)
def test_autocast_lowers_the_format(dtype: torch.dtype, compiled: bool) -> None:
    inputs = [tensor.requires_grad_() for tensor in Case(head_dim=8).inputs(torch.float32)]
    attend = torch.compile(flash_attention, fullgraph=True) if compiled else flash_attention
    with torch.autocast("cpu", dtype):
        output = attend(*inputs, causal=True)
        mixed = flash_attention(inputs[0], inputs[1].to(dtype), inputs[2], causal=True)
        wide = flash_attention(*Case().inputs(), causal=True)
    assert output.dtype == mixed.dtype == dtype
    assert wide.dtype == torch.float64
    output.sum().backward()
    assert {tensor.grad.dtype for tensor in inputs if tensor.grad is not None} == {torch.float32}
    lowered = flash_attention(*(tensor.to(dtype) for tensor in inputs), causal=True)
    torch.testing.assert_close(output, lowered, atol=0, rtol=0)


def test_autocast_reaches_the_triton_kernels() -> None:
    pytest.importorskip("triton")
    from tests.unit.kernels.attention.triton.interpreter import DEVICE

    drawn = Case(num_queries=20, num_keys=20, head_dim=16).inputs(torch.float32)
    inputs = [tensor.to(DEVICE).requires_grad_() for tensor in drawn]
    with torch.autocast(DEVICE, torch.bfloat16):
        output = flash_attention(*inputs, causal=True, backend="triton")
    assert output.dtype == torch.bfloat16
    expected = flash_attention(*inputs, causal=True, backend="tiled")
    torch.testing.assert_close(output.float(), expected, atol=0.02, rtol=0.02)
    output.sum().backward()
    assert inputs[0].grad is not None
    assert inputs[0].grad.dtype == torch.float32


def test_it_is_torchs_own_attention_on_a_cpu() -> None:
    inputs = Case(batch=2, kv_heads=2, group=3, num_queries=40, num_keys=40, head_dim=8).inputs()
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    assert torch.equal(flash_attention(*inputs, causal=True), expected)
    scaled = F.scaled_dot_product_attention(*inputs, scale=0.1, enable_gqa=True)
    assert torch.equal(flash_attention(*inputs, causal=False, scale=0.1), scaled)


def test_log_sum_exps_are_tiled_where_torch_returns_none() -> None:
    choice = explain_backend("mps", return_lse=True)
    assert str(choice).startswith(
        "tiled: SDPA on 'mps' does not return log-sum-exps, and there are"
    )
    tensors = torch.empty(3, 2, 4, 5, 8, device="meta")
    _, lse = flash_attention(*tensors, causal=True, return_lse=True)
    assert lse.shape == (2, 4, 5)
    with pytest.raises(UsageError, match='use backend="triton" or "tiled"'):
        flash_attention(*tensors, causal=True, return_lse=True, backend="sdpa")


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_the_keys_are_joined_by_their_sums(backend: Backend) -> None:
    query, key, value = Case(num_queries=9, num_keys=20).inputs()
    parts = [
        flash_attention(query, keys, values, causal=False, return_lse=True, backend=backend)
        for keys, values in zip(key.split(7, dim=2), value.split(7, dim=2), strict=True)
    ]
    lses = torch.stack([lse for _, lse in parts])
    shares = torch.softmax(lses, dim=0).unsqueeze(-1)
    joined = sum(share * output for share, (output, _) in zip(shares, parts, strict=True))
    whole, lse = flash_attention(query, key, value, causal=False, return_lse=True, backend=backend)
    torch.testing.assert_close(joined, whole)
    torch.testing.assert_close(torch.logsumexp(lses, dim=0), lse)


def test_generation_with_a_cache_aligns_the_last_query_with_the_last_key() -> None:
    query, key, value = Case(num_queries=12, num_keys=12).inputs()
    whole = flash_attention(query, key, value, causal=True)
    for first in (3, 11):
        last = flash_attention(
            query[:, :, first:], key, value, causal=True, causal_align="bottom_right"
        )
        torch.testing.assert_close(last, whole[:, :, first:])


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
@pytest.mark.parametrize(
    ("batch", "num_queries", "num_keys"), [(0, 3, 3), (1, 0, 3), (1, 3, 0), (1, 0, 0)]
)
def test_empty_inputs_have_empty_or_zero_results(
    backend: AttentionBackend, batch: int, num_queries: int, num_keys: int
) -> None:
    _require(backend)
    options: dict[str, Any] = {"device": _device(backend), "requires_grad": True}
    query = torch.randn(batch, 2, num_queries, 4, **options)
    key, value = (torch.randn(batch, 2, num_keys, 4, **options) for _ in range(2))
    output, lse = flash_attention(query, key, value, causal=True, return_lse=True, backend=backend)
    assert output.shape == query.shape
    assert not output.any()
    assert torch.isneginf(lse).all()
    output.sum().backward()
    assert query.grad is not None
    assert not query.grad.any()


def test_only_the_sums_may_be_wanted() -> None:
    case = Case(num_queries=6, num_keys=6)
    inputs = [tensor.requires_grad_() for tensor in case.inputs()]
    _, lse = flash_attention(*inputs, causal=True, return_lse=True)
    gradients = torch.autograd.grad(lse.sum(), inputs)
    nothing, ones = torch.zeros_like(inputs[0]), torch.ones_like(lse)
    expected = expected_results(tuple(case.inputs()), 0, 0.5, nothing, ones)
    torch.testing.assert_close(gradients, tuple(expected[2:]))


def test_what_is_chosen_is_explained(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    objection_to_triton.cache_clear()
    assert str(explain_backend("cpu")).startswith("sdpa: on CPUs")
    assert str(explain_backend("cuda")) == (
        "sdpa: the Triton kernels have not been tested on this device; "
        "run `paceline env --self-test`"
    )
    assert "mps" in explain_backend("mps").reason
    assert str(explain_backend("cuda", backend="tiled")) == "tiled: it was asked for"
    assert explain_backend("cuda", dtype=torch.float64).reason.endswith("compute in float64")
    assert "up to 256 numbers, these have 300" in explain_backend("cuda", head_dim=300).reason
    assert [resolve_implementation(name, "cpu") for name in ("auto", "naive", "tiled")] == [
        "sdpa",
        "naive",
        "tiled",
    ]


def _tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (_tensors(*[(2, 3, 4)] * 3), r"must be \(batch, heads, sequence, head_dim\)"),
        (_tensors((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 6, 4)), "same shape"),
        (_tensors((1, 2, 3, 4), *[(1, 2, 3, 8)] * 2), "batch and head_dim must agree"),
        (_tensors((1, 3, 3, 4), *[(1, 2, 3, 4)] * 2), "multiple of the key's"),
        (
            _tensors(*[(1, 2, 3, 4)] * 3, dtype=torch.int64),
            r"the dtypes must be of .* got query \(1, 2, 3, 4\) torch\.int64",
        ),
        (
            [*_tensors((1, 2, 3, 4)), *_tensors(*[(1, 2, 3, 4)] * 2, dtype=torch.float64)],
            r"one dtype.*autocast, got .*key \(1, 2, 3, 4\) torch\.float64",
        ),
        (_tensors(*[(1, 2, 3, 0)] * 3), "head_dim must be at least 1"),
        (
            [*_tensors(*[(1, 2, 3, 4)] * 2), torch.zeros(1, 2, 3, 4, device="meta")],
            r"one device.*value .* on meta",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_named(inputs: list[Tensor], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        flash_attention(*inputs, causal=True)


def test_autocast_does_not_make_one_format_of_float64() -> None:
    query, key, value = Case().inputs()
    with torch.autocast("cpu"), pytest.raises(UsageError, match="must have one dtype"):
        flash_attention(query.float(), key, value, causal=True)


def test_what_triton_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for dtype, head_dim, message in (
        (torch.float64, 64, "float64; use float32, .* or backend="),
        (torch.float32, 257, "up to 256 numbers, got 257; use backend="),
    ):
        inputs = _tensors(*[(1, 2, 3, head_dim)] * 3, dtype=dtype)
        with pytest.raises(UsageError, match=message):
            flash_attention(*inputs, causal=True, backend="triton")
    monkeypatch.setitem(sys.modules, "paceline.kernels.attention.triton.backend", None)
    inputs = _tensors(*[(1, 2, 3, 64)] * 3)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[triton\]'"):
        flash_attention(*inputs, causal=True, backend="triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    triton_obstacle.cache_clear()
    assert "triton is not installed" in explain_backend("cuda").reason
    triton_obstacle.cache_clear()


@pytest.mark.parametrize("option", [{"backend": "flash"}, {"causal_align": "upper_left"}])
def test_a_mistyped_option_is_named(option: dict[str, Any]) -> None:
    (name, value), *_ = option.items()
    with pytest.raises(ShapeError, match=rf"attention\.{name} is '{value}'; it must be one of"):
        flash_attention(*Case().inputs(), causal=True, **option)


def test_shapes_are_told_without_numbers() -> None:
    query = torch.empty(2, 4, 5, 8, device="meta")
    key, value = torch.empty(2, 2, 2, 7, 8, device="meta")
    assert flash_attention(query, key, value, causal=True).shape == query.shape


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(7, 4), (4, 7), (5, 5)])
def test_torchs_choice_on_other_devices_hides_and_zeroes_alike(
    align: Literal["top_left", "bottom_right"], num_queries: int, num_keys: int
) -> None:
    inputs = Case(num_queries=num_queries, num_keys=num_keys, group=2).inputs()
    diagonal = causal_diagonal(num_queries, num_keys, causal=True, align=align)
    chosen = _torch_attention(*inputs, diagonal, None)
    torch.testing.assert_close(chosen, flash_attention(*inputs, causal=True, causal_align=align))


@pytest.mark.parametrize("diagonal", [None, 0, 3])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_torchs_choice_on_other_devices_takes_any_scale(scale: float, diagonal: int | None) -> None:
    inputs = Case(num_queries=4, num_keys=7).inputs()
    expected, _ = attention_op(*inputs, diagonal, scale, "tiled")
    torch.testing.assert_close(_torch_attention(*inputs, diagonal, scale), expected)


@pytest.mark.parametrize("diagonal", [-1, 0, 4])
def test_torchs_choice_on_other_devices_compiles_whole(diagonal: int) -> None:
    inputs = Case(group=2, num_queries=8, num_keys=12).inputs(torch.float32)
    compiled = torch.compile(_torch_attention, fullgraph=True, dynamic=True, backend="eager")
    expected = _torch_attention(*inputs, diagonal, None)
    torch.testing.assert_close(compiled(*inputs, diagonal, None), expected)


def test_no_tensor_of_all_scores_is_kept_for_backward() -> None:
    inputs = [
        tensor.requires_grad_()
        for tensor in Case(kv_heads=2, num_queries=200, num_keys=200, head_dim=8).inputs()
    ]
    for backend in BACKENDS:
        kept: dict[int, int] = {}

        def count(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output = flash_attention(*inputs, causal=True, backend=backend)
        assert sorted(kept.values()) == sorted([400, *itertools.repeat(2 * 200 * 8, 4)])
        assert output.grad_fn is not None
