"""The places of parameters in flat shards and messages, and the ranks that share them."""

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from paceline.core.errors import UsageError
from paceline.parallel import FullyShardedDataParallel
from paceline.parallel.fsdp.sharding import LayerLayout, lay_out, resolve_sharding
from tests.unit.parallel.fsdp.ranks import data, fsdp_ranks, require_gradients

_CPU = torch.device("cpu")


def _lay_out(
    shapes: Sequence[Sequence[int]], num_shards: int, dtype: torch.dtype = torch.float32
) -> LayerLayout:
    parameters = [torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in shapes]
    return lay_out(parameters, dtype, _CPU, num_shards)


def _places(layout: LayerLayout) -> list[tuple[int, int, int]]:
    return [(piece.rows, piece.offset, piece.num_elements) for piece in layout.pieces]


def _runs(layout: LayerLayout) -> list[tuple[int, int, bool]]:
    return [(run.begin, run.end, run.is_one) for run in layout.runs]


def test_small_parameters_stand_one_after_another_each_aligned() -> None:
    layout = _lay_out([(5, 3), (), (0, 3), (2,), (7, 2, 2)], 2)
    assert _places(layout) == [(3, 0, 9), (1, 12, 1), (0, 16, 0), (1, 16, 1), (4, 20, 16)]
    assert _runs(layout) == [(0, 36, False)]
    assert (layout.length, layout.packed_length) == (36, 36)
    assert layout.row_length == 36 + 8  # Five flags, padded to a multiple of four numbers.
    (run,) = layout.runs
    # A piece of a single element is in the run, one without elements is in none.
    assert [piece in run for piece in layout.pieces] == [True, True, False, True, True]
    assert not any(layout.travels_alone(piece) for piece in layout.pieces)
    wide = _lay_out([(5, 3), (2,)], 2, torch.float64)
    assert _places(wide) == [(3, 0, 9), (1, 10, 1)]
    assert wide.row_length == 12 + 2


def test_parameters_of_a_mebibyte_stand_behind_the_others_in_runs_of_their_own() -> None:
    shapes = [(3,), (512, 512), (511, 512), (1024, 512), (2, 2)]
    layout = _lay_out(shapes, 4)
    alone = [layout.travels_alone(piece) for piece in layout.pieces]
    assert alone == [False, True, False, True, False]
    packed = 4 + 128 * 512 + 4
    first = packed + 128 * 512
    assert _places(layout) == [
        (1, 0, 1),
        (128, packed, 128 * 512),
        (128, 4, 128 * 512),
        (256, first, 256 * 512),
        (1, 4 + 128 * 512, 2),
    ]
    assert _runs(layout) == [
        (0, packed, False),
        (packed, first, True),
        (first, first + 256 * 512, True),
    ]
    assert layout.packed_length == packed
    assert layout.length == first + 256 * 512
    together, *separate = layout.runs
    assert [piece in together for piece in layout.pieces] == [True, False, True, False, True]
    for run, position in zip(separate, (1, 3), strict=True):
        assert [piece in run for piece in layout.pieces] == [n == position for n in range(5)]
    # The receive buffers of both, one row per rank, do not overlap.
    buffer = torch.empty(layout.place_alone(layout.length), device="meta")
    assert buffer.numel() == 512 * 512 + 1024 * 512
    gathered = torch.empty(4 * packed, device="meta")
    assert layout.rows(together, buffer, gathered).shape == (4, packed)
    rows = [layout.rows(run, buffer, gathered) for run in separate]
    assert [each.shape for each in rows] == [(4, 128 * 512), (4, 256 * 512)]
    assert [each.storage_offset() for each in rows] == [0, 512 * 512]


def test_one_rank_gathers_each_contiguous_parameter_where_it_is() -> None:
    layout = _lay_out([(5, 3), (), (0, 3)], 1)
    assert _runs(layout) == [(0, 15, True), (16, 17, True)]
    assert (layout.packed_length, layout.length) == (0, 20)
    layout = lay_out([torch.empty(3, 5).T, torch.empty(2)], torch.float32, _CPU, 1)
    assert _runs(layout) == [(0, 16, False), (16, 18, True)]
    assert (layout.packed_length, layout.length) == (16, 20)
    layout = _lay_out([(0, 3)], 2)
    assert _runs(layout) == []


def test_ranks_have_equally_many_rows_except_the_last() -> None:
    (piece,) = _lay_out([(5, 3)], 4).pieces
    assert [piece.num_rows(shard) for shard in range(4)] == [2, 2, 1, 0]
    full = torch.arange(15.0).view(5, 3)
    assert [piece.own_rows(full, shard).shape[0] for shard in range(4)] == [2, 2, 1, 0]
    (scalar,) = _lay_out([()], 2).pieces
    assert [scalar.num_rows(shard) for shard in range(2)] == [1, 0]
    assert scalar.local(torch.tensor([7.0, 8.0]), 0) == 7
    (few,) = _lay_out([(1, 2)], 4).pieces
    flat = torch.arange(4.0)
    assert [few.local(flat, shard).tolist() for shard in range(3)] == [[[0, 1]], [], []]
    assert few.local(flat, 3).shape == (0, 2)
    (empty,) = _lay_out([(0, 3)], 4).pieces
    assert empty.local(flat, 1).shape == (0, 3)
    assert list(empty.blocks(torch.empty(4, 4), torch.empty(0, 3))) == []


def test_blocks_of_all_ranks_are_the_full_parameter() -> None:
    _, second = _lay_out([(4,), (5, 3)], 2).pieces
    rows = torch.arange(32.0).view(2, 16)  # The shards from element 4 on.
    full = torch.empty(5, 3)
    for source, target in second.blocks(rows, full, begin=4):
        target.copy_(source)
    assert torch.equal(full, torch.cat([rows[0, :9].view(3, 3), rows[1, :6].view(2, 3)]))
    number = torch.empty(())
    (scalar,) = _lay_out([()], 1).pieces
    ((source, target),) = scalar.blocks(torch.tensor([[3.0, 0, 0, 0]]), number)
    target.copy_(source)
    assert number == 3


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(data(0, rank, 5)).square().sum()


def test_two_dimensions_shard_in_rows_and_average_over_all() -> None:
    def program(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
        ours, oracle = FullyShardedDataParallel(_linear(), process_group=mesh), _linear()
        assert ours.process_group is dist.group.WORLD
        for parameter in ours.parameters():
            assert parameter.placements == (Replicate(), Shard(0))
            assert parameter.device_mesh == mesh
        ranks.taken()
        _loss(ours, rank).backward()
        for other in range(6):
            (_loss(oracle, other) / 6).backward()
        require_gradients(ours, oracle, rank % 3, 3)
        return [line for line in ranks.taken() if "reduce" in line]

    with fsdp_ranks(6) as ranks:
        # A row of three and one number of the second layer, a row of five and one of the first,
        # and two flags each, all padded to sixteen bytes.
        assert ranks.run(program)[0] == [
            f"reduce-scatter {3 * (4 + 4 + 4)} among 3",
            f"reduce-scatter {3 * (8 + 4 + 4)} among 3",
            "all-reduce 12 among 2",
            "all-reduce 16 among 2",
        ]


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum() * self.scale


def test_a_scalar_is_on_all_ranks_and_averaged_over_all() -> None:
    def program(rank: int) -> list[str]:
        shape = (2, 2) if dist.get_world_size() == 4 else (2,)
        mesh = init_device_mesh("cpu", shape)
        ours, oracle = FullyShardedDataParallel(_Scaled(), process_group=mesh), _Scaled()
        ranks.taken()
        ours(data(0, rank)).backward()
        for other in range(dist.get_world_size()):
            (oracle(data(0, other)) / dist.get_world_size()).backward()
        require_gradients(ours, oracle, rank % 2, 2)
        return [line for line in ranks.taken() if line.startswith("all-reduce")]

    with fsdp_ranks(2) as ranks:
        # One number and one flag, each padded to sixteen bytes.
        assert ranks.run(program)[0] == ["all-reduce 8"]
    with fsdp_ranks(4) as ranks:
        sums = ranks.run(program)[0]
        assert sorted(sums) == ["all-reduce 8 among 2"] * 3  # Of both dimensions, and of shards.


def test_a_part_of_a_mesh_averages_over_its_own_ranks() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))
        ours = FullyShardedDataParallel(_linear(), process_group=mesh["replicate", "shard"])
        assert dist.get_process_group_ranks(ours.process_group) == [
            rank // 2 * 2,
            rank // 2 * 2 + 1,
        ]
        oracle = _linear()
        _loss(ours, rank).backward()
        for other in range(rank // 2 * 2, rank // 2 * 2 + 2):
            (_loss(oracle, other) / 2).backward()
        require_gradients(ours, oracle, 0, 1)

    with fsdp_ranks(4) as ranks:
        ranks.run(program)


def test_a_mesh_has_one_dimension_or_two() -> None:
    def program(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 1, 1))
        with pytest.raises(UsageError, match=r"or of two \(replicate, shard\) .* this one has 3"):
            resolve_sharding(mesh, _CPU)
        line = init_device_mesh("cpu", (1,))
        group, sharded, replicated = resolve_sharding(line, _CPU)
        assert group is line.get_group()
        assert sharded.mesh is replicated.mesh is line
        assert sharded.placements == (Shard(0),)
        assert replicated.placements == (Replicate(),)

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


def test_a_sharding_knows_its_ranks() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3, 2))
        _, sharded, replicated = resolve_sharding(mesh, _CPU)
        assert (sharded.num_shards, sharded.shard, sharded.num_ranks) == (2, rank % 2, 6)
        assert (replicated.num_shards, replicated.shard, replicated.num_ranks) == (1, 0, 6)

    with fsdp_ranks(6) as ranks:
        ranks.run(program)


def test_containers_of_all_ranks_share_a_mesh_and_those_of_groups_have_their_own() -> None:
    def program(_rank: int) -> None:
        meshes: list[DeviceMesh] = []
        for group in (None, None, dist.new_group(), dist.new_group()):
            ours = FullyShardedDataParallel(_linear(), process_group=group)
            meshes.append(next(ours.parameters()).device_mesh)
        first, second, *others = meshes
        assert first == second
        assert first not in others
        assert others[0] != others[1]

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


def test_a_group_that_was_destroyed_is_not_kept_alive() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        group = dist.new_group()
        reference = weakref.ref(group)
        ours = FullyShardedDataParallel(_linear(), process_group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert reference() is None
        with pytest.raises(UsageError, match="the process group has been destroyed"):
            _ = ours.process_group
    finally:
        dist.destroy_process_group()
