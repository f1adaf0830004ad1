"""Groups, options and partitions of the sharded optimizer, and what it refuses."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from paceline.core.errors import UsageError
from paceline.parallel import ShardedDataParallel, ShardedOptimizer
from paceline.parallel.zero.flat_parameters import Partition, choose_partition
from tests.unit.parallel.zero.optimizers import (
    PARTITIONS,
    Counting,
    Estimating,
    TakesMore,
    backward,
    require_bits,
)
from tests.unit.parallel.zero.ranks import DECAYING, ONE_EACH, Parts, on_ranks


@pytest.mark.parametrize("kind", ["plain", "container"])
@pytest.mark.parametrize("late", [1, 2, 3])
def test_groups_and_their_options(kind: str, late: int) -> None:
    """Groups that are given at once or added, with options of their own and a scheduler."""

    def program(rank: int) -> None:
        ours: nn.Module = Parts()
        alone = Parts()
        if kind == "container":
            ours = ShardedDataParallel(ours, 64 / 2**20)
        optimizers: list[Optimizer] = []
        for model, make in ((ours, ShardedOptimizer), (alone, _make_plain)):
            parameters = list(model.parameters())
            groups: list[dict[str, Any]] = [
                {"params": parameters[:2], "lr": 0.02},
                {"params": parameters[3:4], "momentum": 0.5},
                {"params": [parameters[2], parameters[4]], "weight_decay": 0.0},
            ]
            optimizer = make(groups[:late], SGD, **DECAYING)
            for group in groups[late:]:
                optimizer.add_param_group(group)
            optimizers.append(optimizer)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
        for number in range(3):
            backward(number, ours, alone)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            if kind == "plain":
                require_bits(ours, alone)
        for own, other in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own, other)
        assert len(optimizers[0].param_groups) == 3
        parts = optimizers[0].parts
        assert len({id(shard) for part in parts for shard in part.shards}) == sum(
            len(part.shards) for part in parts
        )

    on_ranks(2, program)


def _make_plain(groups: Any, optimizer_cls: type[Optimizer], **options: Any) -> Optimizer:
    return optimizer_cls(groups, **options)


def test_a_learning_rate_may_be_a_tensor() -> None:
    def program(_rank: int) -> None:
        rates = torch.tensor(0.5), torch.tensor(0.5)
        ours, alone = Parts(), Parts()
        sharded = ShardedOptimizer(ours.parameters(), AdamW, lr=rates[0])
        whole = AdamW(alone.parameters(), lr=rates[1])
        for number in range(6):
            backward(number, ours, alone)
            for optimizer, rate in zip((sharded, whole), rates, strict=True):
                optimizer.step()
                if number == 0:
                    rate.mul_(0.5)
                if number == 1:
                    optimizer.param_groups[0]["lr"] = 0.25
                if number == 2:  # The tensor has been replaced by a number of the same value.
                    rate.fill_(100.0)
                if number == 3:
                    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
                if number == 4:
                    optimizer.param_groups[0]["lr"].fill_(0.125)
            require_bits(ours, alone)

    on_ranks(2, program)


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("kind", ["plain", "container"])
def test_an_optimizer_may_count_in_its_options(kind: str) -> None:
    def program(_rank: int) -> None:
        ours: nn.Module = Parts()
        alone = Parts()
        if kind == "container":
            ours = ShardedDataParallel(ours, ONE_EACH)
        sharded = ShardedOptimizer(ours.parameters(), Counting, lr=0.1)
        whole = Counting(alone.parameters(), lr=0.1)
        for number in range(3):
            backward(number, ours, alone)
            for optimizer in (sharded, whole):
                optimizer.step()
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] *= 0.5
            group, expected = sharded.param_groups[0], whole.param_groups[0]
            assert group["count"] == expected["count"] == number + 1
            assert group["trace"] == expected["trace"]
        for own, other in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own, other)
        # Counts that the user sets are the optimizers'.
        for optimizer in (sharded, whole):
            optimizer.param_groups[0]["count"] = 10
        backward(3, ours, alone)
        sharded.step()
        whole.step()
        for own, other in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own, other)
        assert sharded.param_groups[0]["count"] == 11
        # What changes between two steps is saved too.
        for part in sharded.parts:
            assert part.inner is not None
            part.inner.param_groups[0]["count"] = 20
        assert sharded.state_dict()["param_groups"][0]["count"] == 20

    on_ranks(2, program)


@pytest.mark.usefixtures("elementwise")
def test_a_list_among_the_options_is_the_optimizers_own() -> None:
    def program(_rank: int) -> None:
        ours = Parts()
        groups = [{"params": list(ours.parameters()), "trace": [0.5]}]
        sharded = ShardedOptimizer(groups, Counting, lr=0.1)
        for part in sharded.parts:
            assert part.inner is not None
            assert part.inner.param_groups[0]["trace"] is not sharded.param_groups[0]["trace"]
        backward(0, ours)
        sharded.step()
        mine = sharded.param_groups[0]["trace"]
        mine.append(0.25)
        backward(1, ours)
        sharded.step()
        assert sharded.param_groups[0]["trace"] == [0.5, 0.1, 0.25, 0.1]

    on_ranks(2, program)


@pytest.mark.usefixtures("elementwise")
def test_what_inner_optimizers_disagree_on_is_not_taken_over() -> None:
    def program(_rank: int) -> None:
        parameters = [nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(32).double())]
        sharded = ShardedOptimizer(parameters, Estimating, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        sharded.step()
        assert "size" not in sharded.param_groups[0]
        with pytest.raises(Exception, match=r"keeps 'size' in its groups, and has computed 16, 8 "):
            sharded.full_state_dict()

    on_ranks(2, program)


@pytest.mark.usefixtures("elementwise")
def test_a_step_passes_its_options_on() -> None:
    def program(_rank: int) -> None:
        parameter = nn.Parameter(torch.zeros(4))
        sharded = ShardedOptimizer([parameter], TakesMore, lr=1.0, partition="elements")
        parameter.grad = torch.ones(4)
        sharded.step(scale=3.0)
        assert parameter.tolist() == [-3.0] * 4

    on_ranks(2, program)


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("partition", PARTITIONS)
def test_ranks_that_own_nothing_take_part(partition: str) -> None:
    def program(rank: int) -> int:
        ours, alone = (nn.Parameter(torch.tensor([[1.0]])) for _ in range(2))
        sharded = ShardedOptimizer([ours], Counting, partition=partition, lr=0.1)
        whole = Counting([alone], lr=0.1)
        for _ in range(3):
            for parameter, optimizer in ((ours, sharded), (alone, whole)):
                parameter.grad = torch.tensor([[0.5]])
                optimizer.step()
        assert torch.equal(ours, alone)
        (part,) = sharded.parts
        assert part.inner is not None
        # Options count on all ranks; the stand-in for the shard has the dimensions of one.
        assert part.inner.param_groups[0]["count"] == 3
        (tensor,) = part.inner.param_groups[0]["params"]
        assert tensor.shape == (
            (0, 0) if not part.shards else (1,) if partition == "elements" else (1, 1)
        )
        return len(part.shards)

    assert sum(on_ranks(3, program)) == 1


def test_the_stand_in_for_a_scalar_has_one_dimension() -> None:
    def program(rank: int) -> list[int]:
        sharded = ShardedOptimizer([nn.Parameter(torch.ones(()))], SGD, partition="parameters")
        (part,) = sharded.parts
        assert part.inner is not None
        return list(part.inner.param_groups[0]["params"][0].shape)

    assert on_ranks(2, program) == [[], [0]]


def test_the_choice_of_a_partition() -> None:
    assert choose_partition(None, AdamW) is Partition.ELEMENTS
    assert choose_partition(None, Adafactor) is Partition.PARAMETERS
    assert choose_partition(None, Counting) is Partition.PARAMETERS  # It may do anything.
    assert choose_partition("parameters", AdamW) is Partition.PARAMETERS
    assert choose_partition("parameters", Muon) is Partition.PARAMETERS
    assert choose_partition("elements", SGD) is Partition.ELEMENTS
    with pytest.raises(
        UsageError, match="must be one of elements, parameters, or None; got 'rows'"
    ):
        choose_partition("rows", AdamW)
    with pytest.raises(UsageError, match=r"Adafactor is not known .* use partition=\"parameters\""):
        choose_partition("elements", Adafactor)


class NeedsClosure(SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class NoClosure(SGD):
    def step(self) -> Any:  # type: ignore[override]
        return None


def test_what_cannot_work_is_refused_by_name() -> None:
    def program(_rank: int) -> None:
        model = Parts()
        for cls in (torch.optim.LBFGS, NeedsClosure):
            with pytest.raises(UsageError, match=rf"{cls.__name__} evaluates .* cannot be sharded"):
                ShardedOptimizer(model.parameters(), cls)
        with pytest.raises(ValueError, match="Invalid learning rate"):
            ShardedOptimizer(model.parameters(), AdamW, lr=-1.0)
        ShardedOptimizer(Parts().parameters(), NoClosure, lr=0.1).step()
        sharded = ShardedOptimizer(model.parameters(), AdamW)
        with pytest.raises(UsageError, match=r"cannot be copied or pickled: .* full_state_dict"):
            copy.deepcopy(sharded)
        meshed = nn.Parameter(torch.ones(2, 3))
        meshed.device_mesh = "a mesh"  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match=r"of shape \(2, 3\) is a DTensor.* a plain optimizer"):
            ShardedOptimizer([meshed], AdamW)
        table = nn.Embedding(10, 4, sparse=True)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(UsageError, match=r"of shape \(10, 4\) has a torch.sparse_coo gradient"):
            ShardedOptimizer(table.parameters(), AdamW).step()
        backward(0, model)
        model.parts[1].double()
        with pytest.raises(
            UsageError, match=r"'number 1 of shape \(2, 5\)' was moved or converted"
        ):
            sharded.step()

    on_ranks(1, program)


def test_groups_have_the_optimizers_defaults() -> None:
    def program(_rank: int) -> None:
        sharded = ShardedOptimizer(Parts().parameters(), AdamW, weight_decay=0.5)
        assert sharded.defaults == AdamW([torch.zeros(1)], weight_decay=0.5).defaults
        assert sharded.param_groups[0]["betas"] == (0.9, 0.999)
        assert len(sharded.param_groups) == 1
        assert len(sharded.parts) == 1

    on_ranks(2, program)
