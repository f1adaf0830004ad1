import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels import attention, attention_reference


def _by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> list[float]:
    rows = []
    for position, q in enumerate(query.tolist()):
        last = position + 1 if causal else len(key)
        scores = [
            sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q))
            for k in key.tolist()[:last]
        ]
        weights = [math.exp(score) for score in scores]
        for column in range(value.shape[1]):
            total = sum(w * v[column] for w, v in zip(weights, value.tolist(), strict=False))
            rows.append(total / sum(weights))
    return rows


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_the_reference_is_the_formula(length: int, width: int, causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(length, width, dtype=torch.float64) for _ in range(3))
    output = attention_reference(query, key, value, causal=causal)
    assert output.flatten().tolist() == pytest.approx(_by_hand(query, key, value, causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ["auto", "sdpa", "tiled", "naive"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_implementations_agree(
    implementation: Literal["auto", "sdpa", "tiled", "naive"],
    causal: bool,
    heads: int,
    kv_heads: int,
) -> None:
    torch.manual_seed(1)
    query = torch.randn(2, heads, 9, 8, dtype=torch.float64)
    key, value = (torch.randn(2, kv_heads, 9, 8, dtype=torch.float64) for _ in range(2))
    output = attention(query, key, value, causal=causal, implementation=implementation)
    for head in range(heads):
        group = head // (heads // kv_heads)
        expected = attention_reference(
            query[:, head], key[:, group], value[:, group], causal=causal
        )
        torch.testing.assert_close(output[:, head], expected)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 3), (3, 5), (4, 4), (1, 6), (6, 1)])
def test_the_last_query_may_see_the_last_key(num_queries: int, num_keys: int) -> None:
    query = torch.randn(num_queries, 4, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(num_keys, 4, dtype=torch.float64) for _ in range(2))
    output = attention_reference(query, key, value, causal=True, causal_align="bottom_right")
    for position in range(num_queries):
        num_visible = max(0, num_keys - num_queries + position + 1)
        expected = torch.zeros(1, 4, dtype=torch.float64)
        if num_visible:
            seen = key[:num_visible], value[:num_visible]
            expected = attention_reference(query[position : position + 1], *seen, causal=False)
        torch.testing.assert_close(output[position : position + 1], expected)
    output.sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_softmax_is_taken_in_float32() -> None:
    inputs = [torch.randn(2, 16, 8, dtype=torch.float16) for _ in range(3)]
    formats: list[torch.dtype] = []
    softmax = torch.softmax

    def recording(scores: torch.Tensor, **options: Any) -> torch.Tensor:
        result = softmax(scores, **options)
        formats.append(result.dtype)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "softmax", recording)
        output = attention_reference(*inputs, causal=False)
    assert formats == [torch.float32]
    assert output.dtype == torch.float16
