"""Compares the messages that predictions assume with those that containers send."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.core import ModelShape
from paceline.core.strategies import BUCKET_STRATEGIES, StrategyName
from paceline.models import TransformerLM, next_token_loss
from paceline.parallel import RankPool
from paceline.parallel.strategies import apply_strategy, message_sizes
from paceline.predict.step import PREDICTED, gradient_collectives
from tests import devices

Pools = Callable[[int], RankPool]

# Widths that are not multiples of four need padding; 17 MiB fill several buckets.
SHAPE = ModelShape(vocab_size=3001, d_model=266, d_ff=1070, num_layers=3, num_heads=7)
SENDING = [name for name in PREDICTED if name != "none"]
CASES = [
    (name, size)
    for name in SENDING
    for size in ((1.0, 5.0, None) if name in BUCKET_STRATEGIES else (None,))
]


def _messages(rank: int, world_size: int, name: StrategyName, size_mb: float | None) -> list[int]:
    model = apply_strategy(name, TransformerLM(SHAPE).to(devices.own_device()), size_mb)
    tokens = torch.full((1, 4), rank)
    # torch rebuilds its buckets after the first steps, and reports them later.
    for _ in range(5 if isinstance(model, DistributedDataParallel) else 1):
        next_token_loss(model(tokens), tokens).backward()
        model.zero_grad()
    if isinstance(model, DistributedDataParallel):
        assert model._get_ddp_logging_data()["rebuilt_bucket_sizes"]  # type: ignore[no-untyped-call]
    return message_sizes(model)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "size_mb"), CASES)
def test_messages_are_those_that_are_sent(
    rank_pool: Pools, name: StrategyName, size_mb: float | None
) -> None:
    sent = rank_pool(2).run(_messages, name, size_mb)[0]
    sizes = [parameter.numel() for parameter in TransformerLM(SHAPE).parameters()]
    expected = gradient_collectives(name, sizes, 2, size_mb)
    assert [message.num_bytes for message in expected if message.parameters] == sent
    if name in BUCKET_STRATEGIES and size_mb is not None:
        assert len(sent) > 2
