"""Autoregressive generation; our own model uses a key-value cache."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.models.hugging_face import HuggingFaceLM
from paceline.models.layers import LayerCache
from paceline.models.transformer import TransformerLM, TransformerStage


def generate(
    model: TransformerLM | HuggingFaceLM | TransformerStage,
    prompt: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    end_of_document: int | None = None,
    generator: torch.Generator | None = None,
    forward: Callable[..., Tensor] | None = None,
    cached: bool = True,
) -> Iterator[int]:
    """Returns tokens that continue a prompt, until the document ends or the context is full.

    Args:
        model: The model in evaluation mode, on the device of the prompt.
        prompt: One-dimensional, at least one token.
        num_tokens: Maximum number of tokens to generate.
        temperature: Divides the logits; 0 always takes the most likely token.
        top_k: Sample only from this many most likely tokens.
        end_of_document: The token at which to stop; it is not returned.
        generator: Random number generator for sampling.
        forward: Callable to use instead of the model: a strategy's wrapper around it.
        cached: Whether to use a key-value cache; otherwise `forward` gets all tokens each time.
    """
    if prompt.ndim != 1 or not len(prompt):
        raise UsageError("a prompt has at least one token; the end-of-document token begins a text")
    if temperature < 0:
        raise UsageError(f"temperature {temperature} must not be negative")
    if top_k is not None and top_k < 1:
        raise UsageError(f"top-k {top_k} leaves no token to sample; it must be at least 1")
    length = model.max_context_length
    if length is not None and len(prompt) >= length:
        raise UsageError(
            f"a prompt of {len(prompt):,} tokens fills the model's context of {length:,}; shorten "
            "it"
        )
    if length is not None:
        num_tokens = min(num_tokens, length - len(prompt))
    tokens = _tokens(
        model,
        forward or model,
        lambda logits: _choose(logits, temperature, top_k, generator),
        prompt[None],
        num_tokens,
        cached=cached,
    )
    return itertools.takewhile(lambda token: token != end_of_document, tokens)


@torch.no_grad()
def _tokens(
    model: TransformerLM | HuggingFaceLM | TransformerStage,
    forward: Callable[..., Tensor],
    choose: Callable[[Tensor], Tensor],
    tokens: Tensor,
    num_tokens: int,
    *,
    cached: bool,
) -> Iterator[int]:
    room = tokens.shape[-1] + num_tokens
    caches = None
    if cached and isinstance(model, TransformerLM):
        caches = [LayerCache(room) for _ in model.blocks]
    for _ in range(num_tokens):
        logits = forward(tokens) if caches is None else forward(tokens, caches)
        token = choose(logits[0, -1].float())
        yield int(token)
        tokens = (
            torch.cat([tokens, token.view(1, 1)], dim=1) if caches is None else token.view(1, 1)
        )


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
