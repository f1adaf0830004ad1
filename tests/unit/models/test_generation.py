"""Tests that generation with a cache matches the model on the whole sequence."""

import pytest
import torch

from paceline.core.errors import UsageError
from paceline.core.specs import ModelShape
from paceline.models import TransformerLM
from paceline.models.generation import generate
from paceline.models.layers import LayerCache

SHAPE = ModelShape(
    vocab_size=50, d_model=32, d_ff=64, num_layers=2, num_heads=4, num_kv_heads=2,
    max_context_length=24,
)  # fmt: skip


@pytest.fixture
def model() -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(SHAPE).eval()


def test_cached_logits_equal_those_of_the_whole_sequence(model: TransformerLM) -> None:
    tokens = torch.randint(50, (2, 20))
    whole = model(tokens)
    caches = [LayerCache(20) for _ in model.blocks]
    parts = [model(tokens[:, :7], caches)]
    parts += [model(tokens[:, place : place + 1], caches) for place in range(7, 20)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)


def test_the_likeliest_tokens_are_those_without_a_cache(model: TransformerLM) -> None:
    prompt = torch.tensor([3, 1, 4])
    expected = prompt
    for _ in range(10):
        likeliest = model(expected[None])[0, -1].argmax()
        expected = torch.cat([expected, likeliest[None]])
    assert list(generate(model, prompt, 10, temperature=0)) == expected[3:].tolist()


def test_it_ends_with_the_document_and_with_the_context(model: TransformerLM) -> None:
    prompt = torch.tensor([3, 1, 4])
    tokens = list(generate(model, prompt, 100, temperature=0))
    assert len(tokens) == SHAPE.max_context_length - len(prompt)
    shorter = list(generate(model, prompt, 100, temperature=0, end_of_document=tokens[4]))
    assert shorter == tokens[: tokens.index(tokens[4])]


def test_top_k_draws_from_the_likeliest(model: TransformerLM) -> None:
    prompt = torch.tensor([3])
    allowed = set(model(prompt[None])[0, -1].topk(3).indices.tolist())
    drawn = {
        next(generate(model, prompt, 1, top_k=3, generator=torch.Generator().manual_seed(seed)))
        for seed in range(60)
    }
    assert drawn == allowed


def test_a_prompt_is_needed(model: TransformerLM) -> None:
    with pytest.raises(UsageError, match="at least one token"):
        next(generate(model, torch.tensor([], dtype=torch.int64), 3))
    with pytest.raises(UsageError, match="temperature -1"):
        next(generate(model, torch.tensor([1]), 3, temperature=-1))
    with pytest.raises(UsageError, match="top-k 0 leaves no token"):
        next(generate(model, torch.tensor([1]), 3, top_k=0))
    with pytest.raises(UsageError, match="24 tokens fills the model's context of 24"):
        next(generate(model, torch.ones(24, dtype=torch.int64), 3))
