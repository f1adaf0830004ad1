"""The sharded optimizer's steps with gradients that all ranks have, compared with torch's own."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

from paceline.core.errors import UsageError
from paceline.parallel import ShardedDataParallel, ShardedOptimizer
from paceline.parallel.zero import optimizer as optimizer_module
from paceline.parallel.zero.flat_parameters import FlatParameters, Partition
from paceline.parallel.zero.optimizer import _batches, state_tensors
from tests.unit.parallel.zero.optimizers import (
    PARTITIONS,
    Interrupted,
    Noting,
    backward,
    make_pair,
    require_bits,
)
from tests.unit.parallel.zero.ranks import (
    DECAYING,
    ONE_EACH,
    SHAPES,
    Parts,
    on_ranks,
    raw,
    zero_ranks,
)

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 0.1, "amsgrad": True}),
    "sgd": (SGD, DECAYING),
    "adafactor": (Adafactor, {"lr": 0.1}),
}


@pytest.mark.parametrize(
    ("name", "partition"),
    [("adamw", "elements"), ("sgd", "elements"), *((name, "parameters") for name in OPTIMIZERS)],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_bits_of_the_unsharded_optimizer(num_ranks: int, name: str, partition: str) -> None:
    def program(_rank: int) -> None:
        cls, options = OPTIMIZERS[name]
        ours, sharded, alone, whole = make_pair(cls, partition=partition, **options)
        for number in range(3):
            backward(number, ours, alone)
            for optimizer in (sharded, whole):
                optimizer.step()
                optimizer.zero_grad(set_to_none=number == 1)
            # The step itself waits for the values.
            assert all(type(parameter) is nn.Parameter for parameter in ours.parameters())
            require_bits(ours, alone)

    on_ranks(num_ranks, program)


class Unusual(nn.Module):
    """Parameters that are empty, complex, strided, frozen, unused, or of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype)

        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(random(5, 7).T)
        self.stepped = nn.Parameter(random(5, 14)[:, ::2])
        self.kernel = nn.Parameter(random(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
        self.phase = nn.Parameter(random(3, 2, dtype=torch.complex64))
        self.precise = nn.Parameter(random(3, dtype=torch.float64))
        self.frozen = nn.Parameter(random(11), requires_grad=False)
        self.idle = nn.Parameter(random(6))


@pytest.mark.parametrize("partition", PARTITIONS)
def test_unusual_parameters(partition: str) -> None:
    def program(_rank: int) -> None:
        ours, sharded, alone, whole = make_pair(AdamW, Unusual, partition=partition, lr=0.1)
        for number in range(4):
            for model in (ours, alone):
                generator = torch.Generator().manual_seed(number)
                for name, parameter in model.named_parameters():
                    if name in ("idle", "frozen") and number < 2:
                        continue
                    gradient = torch.empty_like(parameter)
                    gradient.copy_(
                        torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                    )
                    parameter.grad = gradient.contiguous() if number % 2 else gradient
            for optimizer in (sharded, whole):
                optimizer.step()
                optimizer.zero_grad()
            require_bits(ours, alone)

    on_ranks(3, program)


def test_gradients_of_parameters_stay_where_they_are() -> None:
    def program(_rank: int) -> None:
        ours, sharded, _, _ = make_pair(AdamW, partition="elements", lr=0.1)
        backward(0, ours)
        before = [parameter.grad for parameter in ours.parameters()]
        sharded.step()
        for parameter, gradient in zip(ours.parameters(), before, strict=True):
            assert parameter.grad is gradient
        # The slices that the inner optimizer saw would keep the gradients' memory.
        assert all(shard.tensor.grad is None for shard in sharded.shards())
        assert sharded.gradient_tensors() == []
        sharded.zero_grad(set_to_none=False)
        assert all(not gradient.any() for gradient in before if gradient is not None)
        sharded.zero_grad()
        assert all(parameter.grad is None for parameter in ours.parameters())

    on_ranks(2, program)


@pytest.mark.usefixtures("elementwise")
def test_a_step_that_failed_leaves_nothing_after_gradients_are_dropped() -> None:
    def program(_rank: int) -> None:
        ours = Parts()
        sharded = ShardedOptimizer(ours.parameters(), Interrupted, partition="elements", lr=0.1)
        backward(0, ours)
        with pytest.raises(RuntimeError, match="out of memory"):
            sharded.step()
        assert len(sharded.gradient_tensors()) == len(list(sharded.shards()))
        sharded.zero_grad(set_to_none=False)
        assert not any(gradient.any() for gradient in sharded.gradient_tensors())
        sharded.zero_grad()
        assert sharded.gradient_tensors() == []

    on_ranks(2, program)


def test_whole_parameters_are_no_shards_gradients() -> None:
    def program(_rank: int) -> None:
        ours, sharded, _, _ = make_pair(AdamW, partition="parameters", lr=0.1)
        backward(0, ours)
        assert sharded.gradient_tensors() == []
        assert all(shard.is_whole for shard in sharded.shards())

    on_ranks(2, program)


def test_each_dtype_is_one_message_and_idle_ones_are_not_sent() -> None:
    with zero_ranks(2) as ranks:

        def program(rank: int) -> None:
            ours, sharded, _, _ = make_pair(AdamW, Unusual, lr=0.1, partition="elements")
            trained = [p for n, p in ours.named_parameters() if n not in ("frozen", "precise")]
            for parameter in trained:
                parameter.grad = torch.ones_like(parameter)
            ranks.events[rank].clear()
            sharded.step()
            assert ranks.events[rank] == [
                "send all-gather 2 float64",
                "send all-gather 72 float32",
                "wait all-gather",
                "wait all-gather",
            ]
            ranks.events[rank].clear()
            sharded.zero_grad()
            # Without gradients too: torch's optimizers may change trained parameters then.
            sharded.step()
            assert len(ranks.events[rank]) == 4
            ours.frozen.grad = torch.ones(11)
            ranks.events[rank].clear()
            sharded.step()
            assert "send all-gather 8 float32" in ranks.events[rank]

        ranks.run(program)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_parameter_is_unfrozen_on_the_way(partition: str) -> None:
    def program(_rank: int) -> None:
        def make() -> nn.Module:
            model = Parts()
            model.parts[1].value.requires_grad_(False)
            return model

        ours, sharded, alone, whole = make_pair(AdamW, make, partition=partition, lr=0.1)
        for number in range(4):
            for model in (ours, alone):
                model.parts[1].value.requires_grad_(number >= 2)
            backward(number, ours, alone)
            for optimizer in (sharded, whole):
                optimizer.step()
                optimizer.zero_grad()
            require_bits(ours, alone)

    on_ranks(2, program)


def test_frozen_parameters_do_not_unbalance_trained_ones() -> None:
    """Trained parameters, which have state, are dealt out first."""

    def program(rank: int) -> list[int]:
        parameters = [nn.Parameter(torch.zeros(size)) for size in (100, 8, 8)]
        parameters[0].requires_grad_(False)
        sharded = ShardedOptimizer(parameters, AdamW, partition="parameters")
        return [shard.parameter.numel() for shard in sharded.shards()]

    assert on_ranks(2, program) == [[8, 100], [8]]


def test_a_later_group_goes_to_the_rank_with_the_smaller_load() -> None:
    def program(rank: int) -> list[int]:
        first = [nn.Parameter(torch.zeros(size)) for size in (50, 20)]
        sharded = ShardedOptimizer(first, AdamW, partition="parameters")
        sharded.add_param_group({"params": [nn.Parameter(torch.zeros(16))]})
        sharded.add_param_group({"params": [nn.Parameter(torch.zeros(12))]})
        return [shard.parameter.numel() for shard in sharded.shards()]

    assert on_ranks(2, program) == [[50], [20, 16, 12]]


def test_a_closure_gives_its_loss() -> None:
    def program(_rank: int) -> None:
        ours, sharded, alone, whole = make_pair(AdamW, lr=0.1)
        losses = []
        for model, optimizer in ((ours, sharded), (alone, whole)):

            def closure(model: nn.Module = model, optimizer: Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model(0, 0)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert torch.equal(losses[0], losses[1])
        require_bits(ours, alone)
        assert sharded.step() is None

    on_ranks(2, program)


def test_muon_gets_its_matrices_whole() -> None:
    def program(_rank: int) -> None:
        def make() -> nn.Module:
            return Parts(((3, 4), (4, 4), (5, 2)))

        ours, sharded, alone, whole = make_pair(Muon, make, lr=0.05)
        assert sharded.partition is Partition.PARAMETERS
        for number in range(2):
            backward(number, ours, alone)
            sharded.step()
            whole.step()
            require_bits(ours, alone)

    on_ranks(4, program)


def test_a_whole_parameter_may_have_a_sparse_gradient() -> None:
    def program(_rank: int) -> None:
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        before = table.weight.detach().clone()
        sharded = ShardedOptimizer(table.parameters(), torch.optim.SparseAdam, lr=0.1)
        table(torch.tensor([1])).sum().backward()
        sharded.step()
        changed = (table.weight != before).any(dim=1)
        assert changed.nonzero().flatten().tolist() == [1]

    on_ranks(2, program)


@pytest.mark.parametrize("kind", ["elements", "parameters", "container"])
def test_the_state_is_that_of_this_ranks_shards(kind: str) -> None:
    def program(rank: int) -> int:
        ours: nn.Module = Parts()
        if kind == "container":
            ours = ShardedDataParallel(ours, ONE_EACH)
        sharded = ShardedOptimizer(
            ours.parameters(), AdamW, partition="parameters" if kind == "parameters" else None
        )
        assert not sharded.state
        assert sharded.state_tensors() == []
        backward(0, ours)
        assert sum(gradient.numel() for gradient in sharded.gradient_tensors()) == (
            sum(shard.end - shard.start for shard in sharded.shards()) if kind == "container" else 0
        )
        sharded.step()
        if kind == "container":
            ours.wait_for_parameters()
        own = {shard.tensor for shard in sharded.shards()}
        assert set(sharded.state) == own
        kept = state_tensors(sharded)
        assert len(kept) == 3 * len(own)
        sharded.zero_grad()
        return sum(tensor.numel() for tensor in kept if tensor.dim() and tensor.numel() > 1)

    assert 0 < sum(on_ranks(2, program)) <= 2 * 31


def test_state_tensors_of_other_optimizers() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    plain = Adam([parameter])
    parameter.grad = torch.ones(3)
    plain.step()
    assert [tuple(t.shape) for t in state_tensors(plain)] == [(), (3,), (3,)]
    around: Any = SimpleNamespace(optim=plain)
    assert len(state_tensors(around)) == 3


class _Flat:
    """Stands in for flat parameters of a size."""

    def __init__(self, numel: int) -> None:
        self.master = torch.empty(numel, device="meta")


def test_small_buckets_step_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "_STEPPED_TOGETHER", 10)

    def sizes(*numels: int) -> list[list[int]]:
        flats: Any = [_Flat(numel) for numel in numels]
        return [[flat.master.numel() for flat in batch] for batch in _batches(flats)]

    assert sizes() == []
    assert sizes(3) == [[3]]
    assert sizes(30) == [[30]]
    assert sizes(3, 7) == [[3, 7]]
    assert sizes(3, 7, 1) == [[3, 7], [1]]
    assert sizes(3, 8) == [[3], [8]]
    assert sizes(30, 1, 9, 30, 2) == [[30], [1, 9], [30], [2]]
    assert sizes(4, 4, 4, 4, 4) == [[4, 4], [4, 4], [4]]


@pytest.mark.usefixtures("elementwise")
def test_a_large_bucket_is_sent_before_the_next_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "_STEPPED_TOGETHER", 6)
    with zero_ranks(2) as ranks:
        events = ranks.events
        Noting.events = events

        def program(rank: int) -> None:
            ours = ShardedDataParallel(Parts(((8,), (8,), (4,), (16,))), ONE_EACH)
            sharded = ShardedOptimizer(ours.parameters(), Noting, partition="elements", lr=0.1)
            ours(rank, 0).backward()
            ours.clip_grad_norm_(1.0)
            events[rank].clear()
            sharded.step()
            assert events[rank] == [
                "update",
                "send all-gather 4 float32",
                "update",
                "send all-gather 4 float32",
                "update",
                "send all-gather 4 float32",
                "update",
                "send all-gather 8 float32",
            ]
            # The step leaves them in flight.
            assert ours._shared.are_in_flight
            ours.wait_for_parameters()

        ranks.run(program)


def test_a_smaller_group_of_ranks() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank == 0:
            with pytest.raises(UsageError, match="is not in the process group"):
                ShardedOptimizer(Parts().parameters(), AdamW, process_group=group)
            return
        for partition in PARTITIONS:
            ours, sharded, alone, whole = make_pair(
                AdamW, lr=0.1, process_group=group, partition=partition
            )
            for number in range(2):
                backward(number, ours, alone)
                sharded.step()
                whole.step()
                require_bits(ours, alone)
            full = sharded.full_state_dict()
            assert bool(full) == (rank == 1)

    on_ranks(3, program)


def test_flat_parameters_keep_values_identity_and_layout() -> None:
    def program(rank: int) -> None:
        model = Unusual()
        before = [(id(p), p.detach().clone(), p.shape, p.requires_grad) for p in model.parameters()]
        sharded = ShardedOptimizer(model.parameters(), AdamW)
        for parameter, (identity, value, shape, trained) in zip(
            model.parameters(), before, strict=True
        ):
            assert id(parameter) == identity
            assert torch.equal(parameter, value)
            assert (parameter.shape, parameter.requires_grad) == (shape, trained)
            assert parameter.grad is None
        for flat in sharded._parts:
            assert isinstance(flat, FlatParameters)
            assert flat.gradient.numel() == 0  # Only a container has gradients of shards.
            assert flat.is_trained == (flat.parameters[0] is not model.frozen)
            assert not flat.was_trained
            assert flat.master is flat.local_shard
            assert not flat.has_master
            for shard in flat.shards:
                whole = shard.parameter.detach()
                if not whole.is_complex() and whole.is_contiguous():
                    assert torch.equal(shard.tensor, whole.view(-1)[shard.start : shard.end])
                assert flat.offset_of(shard) >= 0
                assert raw(shard.tensor).numel() == shard.end - shard.start

    on_ranks(3, program)


def test_parameters_outlive_their_optimizer() -> None:
    def program(rank: int) -> None:
        ours, sharded, alone, whole = make_pair(AdamW, lr=0.1)
        backward(0, ours, alone)
        sharded.step()
        whole.step()
        del sharded
        gc.collect()
        again = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)
        other = SGD(alone.parameters(), lr=0.1)
        again.step()
        other.step()
        require_bits(ours, alone)
        assert len(list(ours.parameters())) == len(SHAPES)

    on_ranks(2, program)
