"""A second, deliberately simple Transformer: the oracle for `TransformerLM`.

It shares only the names in the state dictionary with the package: rotary positions are
multiplications by complex numbers, and attention is a loop over heads with a dense mask.
"""

import math

import torch
from torch import Tensor

from paceline.core import ModelShape


def oracle_logits(weights: dict[str, Tensor], shape: ModelShape, tokens: Tensor) -> Tensor:
    stream = weights["embedding.weight"][tokens]
    for layer in range(shape.num_layers):
        block = {
            name.removeprefix(f"blocks.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        normed = _norm(stream, block["attention_norm.weight"], shape.norm_epsilon)
        stream = stream + _attention(block, shape, normed)
        normed = _norm(stream, block["feed_forward_norm.weight"], shape.norm_epsilon)
        gate = normed @ block["feed_forward.gate.weight"].T
        up = normed @ block["feed_forward.up.weight"].T
        stream = stream + (gate / (1 + torch.exp(-gate)) * up) @ block["feed_forward.down.weight"].T
    return (
        _norm(stream, weights["final_norm.weight"], shape.norm_epsilon) @ weights["head.weight"].T
    )


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + epsilon) * weight


def _rotate(x: Tensor, theta: float) -> Tensor:
    length, width = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    turned = torch.complex(x[..., : width // 2].double(), x[..., width // 2 :].double())
    turned = turned * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def _attention(block: dict[str, Tensor], shape: ModelShape, x: Tensor) -> Tensor:
    query, key, value = (
        x @ block[f"attention.{name}.weight"].T for name in ("query", "key", "value")
    )
    width, group = shape.head_width, shape.num_heads // shape.key_value_heads
    length = x.shape[-2]
    hidden = torch.arange(length)[None, :] > torch.arange(length)[:, None]
    outputs = []
    for head in range(shape.num_heads):
        own = slice(head * width, (head + 1) * width)
        shared = slice((head // group) * width, (head // group + 1) * width)
        scores = _rotate(query[..., own], shape.rope_theta) @ _rotate(
            key[..., shared], shape.rope_theta
        ).transpose(-1, -2)
        scores = (scores / math.sqrt(width)).masked_fill(hidden, -math.inf)
        weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
        outputs.append(weights / weights.sum(dim=-1, keepdim=True) @ value[..., shared])
    return torch.cat(outputs, dim=-1) @ block["attention.output.weight"].T
