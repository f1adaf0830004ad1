"""Test cases of attention, and the formula in float64 as a reference."""

import dataclasses
from typing import Literal, NamedTuple, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.attention.reference import attention_scores

Layout = Literal["heads", "tokens", "dims", "sliced", "expanded"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, a mask and the memory layout of the inputs."""

    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    num_queries: int = 5
    num_keys: int = 5
    head_dim: int = 4
    diagonal: int | None = 0
    layout: Layout = "heads"
    scale: float = 0.5
    magnitude: float = 1.0

    def inputs(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        """Draws query, key and value."""
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int, length: int) -> Tensor:
            size = (self.batch, heads, length, self.head_dim)
            tensor = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
            if self.layout == "tokens":  # the model's layout
                return tensor.transpose(1, 2).contiguous().transpose(1, 2)
            if self.layout == "dims":
                return tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
            if self.layout == "sliced":
                return torch.cat((tensor, tensor), dim=2)[:, :, :length]
            if self.layout == "expanded":
                return tensor[:, :1].expand(size)
            return tensor

        query = draw(self.kv_heads * self.group, self.num_queries) * self.magnitude
        return query, draw(self.kv_heads, self.num_keys), draw(self.kv_heads, self.num_keys)


@st.composite
def cases(draw: st.DrawFn, longest: int = 9) -> Case:
    """Draws small cases; a diagonal may hide all keys from some queries, or none."""
    return Case(
        batch=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        num_queries=draw(st.integers(1, longest)),
        num_keys=draw(st.integers(1, longest)),
        head_dim=draw(st.integers(1, 9)),
        diagonal=draw(st.none() | st.integers(-longest, longest)),
        layout=draw(st.sampled_from(get_args(Layout))),
        scale=draw(st.sampled_from([0.5, -0.3, 0.0])),
        magnitude=draw(st.sampled_from([1.0, 1e4])),
    )


class Expected(NamedTuple):
    """Results and gradients of the formula."""

    output: Tensor
    lse: Tensor
    query_gradient: Tensor
    key_gradient: Tensor
    value_gradient: Tensor


def expected_results(
    inputs: tuple[Tensor, Tensor, Tensor],
    diagonal: int | None,
    scale: float,
    output_gradient: Tensor,
    lse_gradient: Tensor,
) -> Expected:
    """Computes softmax(scale Q Kᵀ) V in float64; queries without visible keys contribute zero."""
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in inputs)
    group = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = attention_scores(query, keys, diagonal=diagonal, scale=scale)
    lse = torch.logsumexp(scores, dim=-1)
    seeing = lse.isfinite()
    probabilities = torch.exp(scores - torch.where(seeing, lse, 0.0).unsqueeze(-1))
    output = probabilities @ values
    total = (output * output_gradient).sum() + (lse * lse_gradient)[seeing].sum()
    return Expected(output.detach(), lse.detach(), *torch.autograd.grad(total, (query, key, value)))
