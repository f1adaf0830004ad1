"""The messages that predictions count on, against those that containers really send."""

from collections.abc import Callable

import pytest
import torch

from paceline.accounting.gradient_messages import gradient_messages
from paceline.accounting.strategy_time import PREDICTED
from paceline.core import ModelShape
from paceline.core.strategies import BUCKET_STRATEGIES, StrategyName
from paceline.models import TransformerLM, next_token_loss
from paceline.parallel import RankPool
from paceline.parallel.strategies import apply_strategy, message_sizes

Pools = Callable[[int], RankPool]

# 7 is no multiple of anything: norms need filling in a bucket.
SHAPE = ModelShape(vocab_size=301, d_model=42, d_ff=170, num_layers=3, num_heads=7)


def _messages(rank: int, world_size: int, name: StrategyName, size_mb: float | None) -> list[int]:
    model = apply_strategy(name, TransformerLM(SHAPE), size_mb)
    tokens = torch.full((1, 8), rank)
    for _ in range(2):  # torch arranges its buckets anew after the first step.
        next_token_loss(model(tokens), tokens).backward()
        model.zero_grad()
    return message_sizes(model)


@pytest.mark.parametrize("name", [name for name in PREDICTED if name not in ("none", "sharded")])
def test_messages_are_those_that_are_sent(rank_pool: Pools, name: StrategyName) -> None:
    size_mb = 0.05 if name in BUCKET_STRATEGIES else None
    sent = rank_pool(2).run(_messages, name, size_mb)[0]
    sizes = [parameter.numel() for parameter in TransformerLM(SHAPE).parameters()]
    assert [message.num_bytes for message in gradient_messages(name, sizes, size_mb)] == sent
