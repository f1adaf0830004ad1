"""Text from a model, token by token, with a cache of keys and values."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.models.layers import LayerCache
from paceline.models.transformer import TransformerLM


def generate(
    model: TransformerLM,
    prompt: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    end_of_document: int | None = None,
    generator: torch.Generator | None = None,
    forward: Callable[..., Tensor] | None = None,
) -> Iterator[int]:
    """Returns tokens that continue a prompt, until the document ends or the context is full.

    Args:
        model: In evaluation mode, on the device of the prompt.
        prompt: One-dimensional, at least one token.
        num_tokens: The most to make.
        temperature: Divides the logits; 0 takes the likeliest token each time.
        top_k: Draw from the so many likeliest tokens only.
        end_of_document: The token after which to stop; it is not returned.
        generator: Source of chance.
        forward: What to call instead of the model: what a strategy has wrapped it in.
    """
    if prompt.ndim != 1 or not len(prompt):
        raise UsageError("a prompt has at least one token; the end-of-document token begins a text")
    if temperature < 0:
        raise UsageError(f"temperature {temperature} must not be negative")
    if top_k is not None and top_k < 1:
        raise UsageError(f"top-k {top_k} leaves no token to draw; it must be at least 1")
    length = model.shape.max_context_length
    if len(prompt) >= length:
        raise UsageError(
            f"a prompt of {len(prompt):,} tokens leaves no room in the model's context of "
            f"{length:,}; shorten it"
        )
    room = min(len(prompt) + num_tokens, length)
    caches = [LayerCache(room) for _ in model.blocks]
    tokens = _tokens(
        lambda tokens: (forward or model)(tokens, caches),
        lambda logits: _choose(logits, temperature, top_k, generator),
        prompt,
        room - len(prompt),
    )
    return itertools.takewhile(lambda token: token != end_of_document, tokens)


@torch.no_grad()
def _tokens(
    forward: Callable[[Tensor], Tensor],
    choose: Callable[[Tensor], Tensor],
    prompt: Tensor,
    num_tokens: int,
) -> Iterator[int]:
    tokens = prompt[None]
    for _ in range(num_tokens):
        token = choose(forward(tokens)[0, -1].float())
        yield int(token)
        tokens = token.view(1, 1)


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    if top_k is not None:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = (logits / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[0]
