"""Text from a model, token by token, with a cache of keys and values."""

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.models.layers import LayerCache
from paceline.models.transformer import TransformerLM


@torch.no_grad()
def generate(
    model: TransformerLM,
    prompt: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    end_of_document: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yields tokens that continue a prompt, until the document ends.

    Args:
        model: In evaluation mode, on the device of the prompt.
        prompt: One-dimensional, at least one token.
        num_tokens: The most to make.
        temperature: Divides the logits; 0 takes the likeliest token each time.
        top_k: Draw from the so many likeliest tokens only.
        end_of_document: The token after which to stop; it is not yielded.
        generator: Source of chance.
    """
    if prompt.ndim != 1 or not len(prompt):
        raise UsageError("a prompt has at least one token; the end-of-document token begins a text")
    if temperature < 0:
        raise UsageError(f"temperature {temperature} must not be negative")
    room = min(len(prompt) + num_tokens, model.shape.max_context_length)
    caches = [LayerCache(room) for _ in model.blocks]
    tokens = prompt[None]
    for _ in range(room - len(prompt)):
        logits = model(tokens, caches)[0, -1].float()
        token = _choose(logits, temperature, top_k, generator)
        chosen = int(token)
        if chosen == end_of_document:
            return
        yield chosen
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
