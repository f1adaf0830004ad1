"""The layers of the model: norm, rotary positions, attention, gated feed-forward.

Norms and rotations are computed in float32 under any autocast precision: their sums and small
angles lose accuracy first in bf16 and fp16.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from paceline.core.specs import AttentionImplementation, ModelShape
from paceline.kernels.attention.api import attention


class RMSNorm(nn.Module):
    """Scales each vector to unit mean square, then by a learned weight (Zhang 2019)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Normalises in float32 and returns a tensor of the input's dtype."""
        normalized = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.epsilon)
        return normalized.type_as(x)


class RotaryPositions(nn.Module):
    """Rotates pairs of channels by an angle proportional to the position (Su 2021)."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, head_dim: int, max_context_length: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_context_length = max_context_length
        self.theta = theta
        angles = torch.empty(max_context_length, head_dim // 2)
        # Derived from the shape, so not part of a checkpoint.
        self.register_buffer("cosine", torch.empty_like(angles), persistent=False)
        self.register_buffer("sine", torch.empty_like(angles), persistent=False)
        self.reset_buffers()

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Fills the tables; call again after a model leaves the meta device."""
        if self.cosine.is_meta:
            return
        device = self.cosine.device
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float64)
        frequencies = self.theta ** (-exponents / self.head_dim)
        positions = torch.arange(self.max_context_length, device=device, dtype=torch.float64)
        angles = torch.outer(positions, frequencies)
        self.cosine.copy_(angles.cos())
        self.sine.copy_(angles.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryPositions":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Moving the model to bf16 must not round the tables.
        if self.cosine.dtype != torch.float32:
            self.cosine = torch.empty_like(self.cosine, dtype=torch.float32)
            self.sine = torch.empty_like(self.sine, dtype=torch.float32)
            self.reset_buffers()
        return self

    def forward(
        self, x: Float[Tensor, "batch heads sequence head_dim"], start: int | Tensor = 0
    ) -> Float[Tensor, "batch heads sequence head_dim"]:
        """Rotates the two halves of each head of queries or keys against each other.

        `start` is the position of the first token, or the positions of all if not contiguous.
        """
        at = start if isinstance(start, Tensor) else slice(start, start + x.shape[-2])
        cosine, sine = self.cosine[at], self.sine[at]
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat(
            (first * cosine - second * sine, second * cosine + first * sine), dim=-1
        )
        return rotated.type_as(x)


class LayerCache:
    """Key-value cache of one layer, allocated once for the maximum length."""

    def __init__(self, max_length: int) -> None:
        self.length = 0
        self._max_length = max_length
        self._kept: tuple[Tensor, Tensor] | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends positions; returns the keys and values of all positions so far."""
        if self._kept is None:
            room = (*key.shape[:-2], self._max_length, key.shape[-1])
            self._kept = key.new_empty(room), value.new_empty(room)
        end = self.length + key.shape[-2]
        for kept, new in zip(self._kept, (key, value), strict=True):
            kept[..., self.length : end, :] = new
        self.length = end
        keys, values = self._kept
        return keys[..., :end, :], values[..., :end, :]


class SequenceShare(Protocol):
    """A rank's part of each sequence under context parallelism."""

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Returns the positions of this rank's `num_tokens` tokens in their sequence."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, implementation: AttentionImplementation
    ) -> Tensor:
        """Computes causal attention of this rank's queries to the keys of all ranks."""


class CausalSelfAttention(nn.Module):
    """Multi-head attention over earlier positions, with grouped key-value heads."""

    def __init__(self, shape: ModelShape, implementation: AttentionImplementation) -> None:
        super().__init__()
        self.head_dim = shape.head_width
        self.implementation: AttentionImplementation = implementation
        self.share: SequenceShare | None = None
        """This rank's part of each sequence; None if it has the whole sequence."""
        self.query = nn.Linear(shape.d_model, shape.attention_width, bias=False)
        self.key = nn.Linear(shape.d_model, shape.key_value_width, bias=False)
        self.value = nn.Linear(shape.d_model, shape.key_value_width, bias=False)
        self.output = nn.Linear(shape.attention_width, shape.d_model, bias=False)

    def forward(
        self,
        x: Float[Tensor, "batch sequence d_model"],
        positions: RotaryPositions,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch sequence d_model"]:
        """Returns causal self-attention of a sequence; with a cache, `x` continues it.

        All layers share `positions`, so that its tables exist once.
        """
        # With a cache, every rank has the whole sequence.
        share = self.share if cache is None else None
        start: int | Tensor = 0 if cache is None else cache.length
        if share is not None:
            start = share.positions(x.shape[1], x.device)
        query = positions(self._split_heads(self.query(x)), start)
        key = positions(self._split_heads(self.key(x)), start)
        value = self._split_heads(self.value(x))
        if cache is not None:
            key, value = cache.append(key, value)
        if share is not None:
            mixed = share.attend(query, key, value, self.implementation)
        else:
            # A single token that continues a sequence may attend to all of it.
            is_causal = cache is None or query.shape[-2] > 1
            mixed = attention(
                query, key, value, causal=is_causal, implementation=self.implementation
            )
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """A feed-forward layer whose hidden activations are gated (Shazeer 2020)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Returns ``down(silu(gate(x)) * up(x))``."""
        mixed: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return mixed
