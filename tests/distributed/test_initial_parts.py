"""Each rank's part of the initial weights is bitwise equal to that of an unsharded model."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from paceline.core.plan import ParallelLayout
from paceline.core.specs import ModelShape
from paceline.models import TransformerLM
from paceline.parallel import RankPool
from paceline.parallel.mesh.layout import MeshGroups, apply_layout
from paceline.training.parallelize import draw_parts
from tests import devices

Pools = Callable[[int], RankPool]


def _draw(rank: int, world_size: int, layout: ParallelLayout, shape: ModelShape) -> list[str]:
    """Returns the names of parameters that differ from the unsharded model's."""
    torch.manual_seed(3)
    device = devices.own_device()
    whole = TransformerLM(shape).to(device)
    with torch.device("meta"):
        model = TransformerLM(shape)
    apply_layout(model, MeshGroups(layout, rank, world_size, device))
    model.to_empty(device=device)
    draw_parts(model, seed=3)
    assert torch.equal(model.positions.cosine, whole.positions.cosine)
    expected = dict(whole.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    return [name for name, each in found.items() if not torch.equal(_whole(each), expected[name])]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _require_equal(rank_pool: Pools, layout: ParallelLayout, **changes: Any) -> None:
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    # 97 tokens do not divide evenly over two or four ranks.
    shape = ModelShape(vocab_size=97, max_context_length=32, **sizes, **changes)
    for different in rank_pool(layout.world_size).run(_draw, layout, shape):
        assert different == []


@pytest.mark.parametrize("tied", [False, True])
def test_tensor_ranks_draw_their_parts(rank_pool: Pools, tied: bool) -> None:
    _require_equal(rank_pool, ParallelLayout(tensor=2), tied_embeddings=tied)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "axes",
    [
        {"shard": 4, "sharding": "parameters"},
        {"tensor": 2, "shard": 2, "sharding": "parameters"},
        {"tensor": 2, "replicate": 2, "sequence_parallel": True},
        {"replicate": 2, "shard": 2, "sharding": "gradients"},
        {"context": 2, "tensor": 2},
    ],
    ids=str,
)
def test_four_ranks_draw_their_parts(rank_pool: Pools, axes: Mapping[str, Any], tied: bool) -> None:
    _require_equal(rank_pool, ParallelLayout(**axes), tied_embeddings=tied)
