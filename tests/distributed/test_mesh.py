"""Every layout trains like one process, and impossible layouts are refused."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from paceline.core.errors import ShapeError, UsageError
from paceline.core.plan import ParallelLayout, Sharding
from paceline.parallel import RankPool
from paceline.parallel.mesh.context import ContextShare
from paceline.parallel.mesh.layout import MeshGroups
from tests import devices
from tests.distributed.device_pool import DevicePool
from tests.distributed.mesh_cases import MeshCase, train_case

Pools = Callable[[int], RankPool]
QUICK = (
    MeshCase(layout=ParallelLayout(tensor=2, sequence_parallel=True), tied=True),
    MeshCase(layout=ParallelLayout(context=2, sharding="gradients")),
)


def layouts(world_size: int) -> Iterator[ParallelLayout]:
    """Yields every layout of `world_size` ranks without a pipeline."""
    shardings: tuple[Sharding, ...] = ("gradients", "parameters")
    sizes = range(1, world_size + 1)
    for tensor, context, replicate, shard in itertools.product(sizes, repeat=4):
        if tensor * context * replicate * shard != world_size:
            continue
        for sharding in shardings if shard > 1 else ("none", *shardings):
            if sharding != "none" and shard * context == 1:
                continue
            for split in (False, True) if tensor > 1 else (False,):
                yield ParallelLayout(
                    tensor=tensor,
                    context=context,
                    replicate=replicate,
                    shard=shard,
                    sharding=sharding,
                    sequence_parallel=split,
                )


def _name(case: MeshCase | ParallelLayout) -> str:
    layout = case.layout if isinstance(case, MeshCase) else case
    sizes = "-".join(
        f"{axis}{getattr(layout, axis)}"
        for axis in ("replicate", "shard", "context", "tensor")
        if getattr(layout, axis) > 1
    )
    return f"{sizes}{'sp' if layout.sequence_parallel else ''}-{layout.sharding}"


@pytest.mark.parametrize("case", QUICK, ids=_name)
def test_a_layout_trains_as_one_process(rank_pool: Pools, case: MeshCase) -> None:
    rank_pool(2).run(train_case, case)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", [*layouts(2), *layouts(4)], ids=_name)
def test_every_layout_trains_as_one_process(
    rank_pool: Pools, layout: ParallelLayout, tied: bool
) -> None:
    # An odd vocabulary splits unevenly. Four tensor ranks need four key-value heads, others two.
    heads = 2 if layout.tensor < 4 else 4
    case = MeshCase(layout=layout, tied=tied, vocab_size=51, num_kv_heads=heads, steps=10)
    rank_pool(layout.world_size).run(train_case, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        MeshCase(
            layout=ParallelLayout(
                tensor=2,
                shard=2,
                sharding="parameters",
                sequence_parallel=True,
                activation_checkpointing="full",
            ),
            tied=True,
        ),
        MeshCase(layout=ParallelLayout(context=2, tensor=2, activation_checkpointing="full")),
        MeshCase(layout=ParallelLayout(tensor=2, shard=2, sharding="parameters"), autocast=True),
        MeshCase(layout=ParallelLayout(context=2, tensor=2), autocast=True),
        MeshCase(layout=ParallelLayout(context=2, sharding="parameters"), compiles=True),
    ],
    ids=[
        "recomputed-shards",
        "recomputed-context",
        "bf16-shards",
        "bf16-context",
        "compiled-context",
    ],
)
def test_recomputation_precision_and_compilation(rank_pool: Pools, case: MeshCase) -> None:
    if case.compiles:
        # On a busy machine the compiler alone takes longer than ranks otherwise may.
        with DevicePool(case.layout.world_size, timeout_s=240) as pool:
            pool.run(train_case, case)
        return
    rank_pool(case.layout.world_size).run(train_case, case)


@pytest.mark.slow
def test_eight_ranks(rank_pool: Pools) -> None:
    layout = ParallelLayout(
        tensor=2, context=2, shard=2, sharding="parameters", sequence_parallel=True
    )
    rank_pool(8).run(train_case, MeshCase(layout=layout, tied=True, steps=10))


def _groups(rank: int, world_size: int) -> tuple[int, int, int, tuple[int, ...]]:
    layout = ParallelLayout(replicate=2, context=2)
    groups = MeshGroups(layout, rank, world_size, devices.own_device())
    assert groups.tensor is None
    assert groups.pipeline is None
    assert groups.shards is None
    assert groups.replicas is not None
    assert groups.context is not None
    share = ContextShare(groups.context)
    own = share.take(torch.arange(8).expand(2, 8))
    assert torch.equal(own[0], share.positions(4, devices.own_device()))
    assert torch.equal(share.put_together(own, dim=1)[1], torch.arange(8))
    with pytest.raises(ShapeError, match="6 tokens is not divisible into 4 parts, two for each"):
        share.take(torch.zeros(1, 6))
    with pytest.raises(UsageError, match=r"a layout of 2 ranks .tensor 2. cannot run on 4; start"):
        MeshGroups(ParallelLayout(tensor=2), rank, world_size, devices.own_device())
    return groups.data_rank, groups.replicas.size(), groups.gradient_ranks, tuple(own[0].tolist())


def test_ranks_of_a_context_group_read_the_same_sequences(rank_pool: Pools) -> None:
    found = rank_pool(4).run(_groups)
    assert [each[0] for each in found] == [0, 0, 1, 1]
    assert {each[1:3] for each in found} == {(4, 4)}
    assert [each[3] for each in found] == [(0, 1, 6, 7), (2, 3, 4, 5)] * 2
