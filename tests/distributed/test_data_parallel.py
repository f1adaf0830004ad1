"""Compares every container, with different data on each rank, with one process with all data."""

import copy
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paceline.parallel import BucketedDataParallel, RankError, RankPool, contract
from tests import devices
from tests.distributed.device_pool import DevicePool
from tests.distributed.toys import (
    CONTAINERS,
    MODELS,
    Layered,
    Unused,
    data,
    loss_of,
    make_optimizer,
    make_pair,
    oracle_backward,
    require_equal,
    require_identical,
)

Pools = Callable[[int], RankPool]


def _train(rank: int, world_size: int, model: str, container: str) -> None:
    ours, oracle = make_pair(rank, model, container)
    optimizers = make_optimizer(ours), make_optimizer(oracle)
    for step in range(4):
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        require_equal(ours, oracle)
        ours.finish_gradient_synchronization()
        require_equal(ours, oracle)
        for optimizer in optimizers:
            optimizer.step()
            # Alternates: one way of clearing drops the views of the buffer, the other keeps them.
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        require_equal(ours, oracle)


@pytest.mark.sampled(40)
@pytest.mark.parametrize(
    ("model", "world_size"),
    [
        *itertools.product(MODELS, (3,)),
        *itertools.product(("layered", "tied"), (1, 2)),
        *(pytest.param(model, 4, marks=pytest.mark.slow) for model in ("layered", "tied")),
    ],
)
@pytest.mark.parametrize("container", CONTAINERS)
def test_training_equals_one_process(
    rank_pool: Pools, model: str, container: str, world_size: int
) -> None:
    rank_pool(world_size).run(_train, model, container)


def _accumulate(rank: int, world_size: int, model: str, container: str, way: str) -> None:
    ours, oracle = make_pair(rank, model, container)
    optimizers = make_optimizer(ours), make_optimizer(oracle)
    for step in range(0, 6, 3):
        if way == "no_sync":
            with ours.no_sync():
                loss_of(ours(data(step, rank), rank)).backward()
                ours.finish_gradient_synchronization()
                loss_of(ours(data(step + 1, rank), rank)).backward()
        elif way == "forward_in_no_sync":
            for micro in (step, step + 1):
                with ours.no_sync():
                    loss = loss_of(ours(data(micro, rank), rank))
                loss.backward()
        else:  # Both passes are synchronized.
            loss_of(ours(data(step, rank), rank)).backward()
            loss_of(ours(data(step + 1, rank), rank)).backward()
        loss_of(ours(data(step + 2, rank), rank)).backward()
        for micro in range(step, step + 3):
            oracle_backward(oracle, micro, world_size)
        require_equal(ours, oracle)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    require_equal(ours, oracle)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("way", ["no_sync", "forward_in_no_sync", "twice"])
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("model", ["layered", "unused_on_one_rank"])
def test_several_backward_passes_accumulate(
    rank_pool: Pools, model: str, container: str, way: str, world_size: int
) -> None:
    rank_pool(world_size).run(_accumulate, model, container, way)


def _fail_in_no_sync(rank: int, world_size: int) -> None:
    ours, oracle = make_pair(rank, "layered", "ddp")
    with pytest.raises(ZeroDivisionError), ours.no_sync():
        raise ZeroDivisionError
    loss_of(ours(data(0, rank), rank)).backward()
    oracle_backward(oracle, 0, world_size)
    require_equal(ours, oracle)


def test_an_error_inside_no_sync_does_not_switch_synchronisation_off(rank_pool: Pools) -> None:
    rank_pool(2).run(_fail_in_no_sync)


def _replace_gradients(rank: int, world_size: int, container: str) -> None:
    ours, oracle = make_pair(rank, "layered", container)
    for model in (ours, oracle):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
    loss_of(ours(data(0, rank), rank)).backward()
    oracle_backward(oracle, 0, world_size)
    require_equal(ours, oracle)
    buffers = {bucket.buffer.untyped_storage().data_ptr() for bucket in ours._synchronizer.buckets}
    for parameter in ours.parameters():
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() in buffers


@pytest.mark.parametrize("container", CONTAINERS)
def test_gradients_that_the_user_sets_are_counted_and_become_views(
    rank_pool: Pools, container: str
) -> None:
    rank_pool(2).run(_replace_gradients, container)


def _equal_torch(rank: int, _world_size: int, container: str, model_name: str) -> None:
    ours, theirs = make_pair(rank, model_name, container)
    theirs = DistributedDataParallel(theirs)
    optimizers = make_optimizer(ours), make_optimizer(theirs)
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            loss_of(model(data(step, rank), rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for own, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, reference)


@pytest.mark.parametrize("model", ["layered", "tied", "frozen", "checkpoint"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_two_ranks_are_equal_to_torch_to_the_bit(
    rank_pool: Pools, container: str, model: str
) -> None:
    rank_pool(2).run(_equal_torch, container, model)


def _drift(rank: int, world_size: int, ours: bool) -> bool:
    torch.manual_seed(0)
    model = Unused()
    container = BucketedDataParallel(model) if ours else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(container.parameters(), lr=1.0)
    loss_of(container(data(0, rank), rank)).backward()
    optimizer.step()
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    gathered = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(gathered, own)
    return not torch.equal(gathered[0], gathered[1])


def test_torch_drifts_silently_with_an_unused_parameter_and_we_do_not(rank_pool: Pools) -> None:
    # pytorch#128949: the bucket that waits for the unused parameter is never sent.
    assert all(rank_pool(2).run(_drift, False))
    assert not any(rank_pool(2).run(_drift, True))


def _explain_unused(rank: int, _world_size: int, model: str, container: str) -> list[str]:
    ours, _ = make_pair(rank, model, container)
    loss_of(ours(data(0, rank), rank)).backward()
    return [f"{unused.name} on {unused.ranks}" for unused in ours.explain_unused()]


@pytest.mark.parametrize("container", CONTAINERS)
def test_unused_parameters_are_named_with_their_ranks(rank_pool: Pools, container: str) -> None:
    for found in rank_pool(3).run(_explain_unused, "unused_on_one_rank", container):
        assert found == ["side.weight on (1,)", "side.bias on (1,)"]
    for found in rank_pool(3).run(_explain_unused, "unused", container):
        assert found == ["idle.weight on (0, 1, 2)", "idle.bias on (0, 1, 2)"]
    for found in rank_pool(3).run(_explain_unused, "layered", container):
        assert found == []


def _explain_to_few(rank: int, _world_size: int) -> tuple[list[tuple[tuple[int, ...], int]], int]:
    """Explains with at most two ranks per parameter; also returns the longest message's length."""
    ours, _ = make_pair(rank, "unused", "ddp")
    loss_of(ours(data(0, rank), rank)).backward()
    lengths = []
    all_reduce = dist.all_reduce

    def measured(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        lengths.append(tensor.numel())
        return all_reduce(tensor, *arguments, **keywords)

    with (
        mock.patch.object(contract, "_MOST_NAMED", 2),
        mock.patch.object(dist, "all_reduce", measured),
    ):
        found = ours.explain_unused()
    return [(unused.ranks, unused.num_ranks) for unused in found], max(lengths)


def test_explaining_takes_no_more_where_there_are_more_ranks(rank_pool: Pools) -> None:
    num_parameters = len(list(Unused().parameters()))
    for found, longest in rank_pool(4).run(_explain_to_few):
        assert found == [((0, 1), 4)] * 2
        assert longest == num_parameters


def _skip_backward(rank: int, world_size: int, container: str) -> None:
    """Runs no backward pass on rank 1, which joins by finishing the synchronization."""
    ours, oracle = make_pair(rank, "layered", container)
    loss = loss_of(ours(data(0, rank), rank))
    if rank != 1:
        loss.backward()
    ours.finish_gradient_synchronization()
    total = sum(loss_of(oracle(data(0, other), other)) for other in range(world_size) if other != 1)
    (total / world_size).backward()
    require_equal(ours, oracle)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_rank_without_backward_joins_by_finishing(rank_pool: Pools, container: str) -> None:
    rank_pool(3).run(_skip_backward, container)


def _mismatch(rank: int, _world_size: int, difference: str) -> str:
    model: nn.Module = Layered()
    model.register_buffer("table", torch.zeros(4 if rank == 1 and difference == "buffer" else 3))
    if rank == 1 and difference == "shape":
        model.second = nn.Linear(40, 41, bias=False)
    elif rank == 1 and difference == "strides":
        model.second.weight = nn.Parameter(model.second.weight.detach().T.contiguous().T)
    elif rank == 1 and difference == "missing":
        model.third = nn.Linear(40, 10, bias=False)
    elif rank == 1 and difference == "extra":
        model.fourth = nn.Linear(2, 2)
    elif rank == 1 and difference == "frozen":
        model.first.bias.requires_grad_(False)
    elif rank == 1 and difference == "dtype":
        model.first.double()
    try:
        BucketedDataParallel(model, 5 if rank == 1 and difference == "size" else 25)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("shape", "'second.weight' of shape (40, 40)"),
        ("strides", "'second.weight' of shape (40, 40), strides (1, 40)"),
        ("missing", "rank 0 has parameter 'third.bias'"),
        ("extra", "where rank 1 has parameter 'fourth.weight'"),
        ("frozen", "'first.bias' of shape (40,), strides (1,), torch.float32, frozen"),
        ("dtype", "'first.weight' of shape (40, 10), strides (10, 1), torch.float64"),
        ("buffer", "rank 1 has buffer 'table' of shape (4,)"),
        ("size", "bucket cap 5242880"),
    ],
)
def test_models_that_differ_are_named_on_every_rank(
    rank_pool: Pools, difference: str, message: str
) -> None:
    for text in rank_pool(3).run(_mismatch, difference):
        assert text.startswith("DisagreementError")
        assert message in text
        assert "rank 1 has" in text


def _weighted(rank: int, world_size: int, container: str) -> None:
    ours, oracle = make_pair(rank, "layered", container)
    weights = [3.0, 0.0, 5.0, 1.0][:world_size]
    for step in range(2):
        ours.set_gradient_weight(weights[rank])
        loss_of(ours(data(step, rank), rank)).backward()
        losses = [loss_of(oracle(data(step, other), other)) for other in range(world_size)]
        total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
        (total / sum(weights)).backward()
        require_equal(ours, oracle)
    for step in (2, 3):  # A weight applies once; if all are zero, all ranks count.
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        require_equal(ours, oracle)
        ours.set_gradient_weight(0.0)


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("container", CONTAINERS)
def test_gradients_are_averaged_by_weight(
    rank_pool: Pools, container: str, world_size: int
) -> None:
    rank_pool(world_size).run(_weighted, container)


class _Given(nn.Module):
    """A parameter whose gradient is its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def _reduce_in(
    rank: int,
    world_size: int,
    parameters: torch.dtype,
    reduction: torch.dtype,
    numbers: list[float],
) -> tuple[float, int]:
    container = BucketedDataParallel(_Given(parameters), reduction_dtype=reduction)
    # Scaled by the number of ranks, so that the average is the sum of the numbers.
    given_ = torch.full((8,), numbers[rank] * world_size, dtype=parameters)
    container(given_).backward()
    gradient = container.module.weight.grad
    assert gradient.dtype == parameters
    require_identical(gradient, "gradient")
    return float(gradient[0]), container.message_bytes()[0]


@pytest.mark.parametrize(
    ("parameters", "reduction", "expected", "element_bytes"),
    [
        # bf16 can represent 1 + 2^-7 but not 1 + 2^-9: sums one by one in bf16 lose small values.
        (torch.bfloat16, torch.float32, 1 + 2**-7, 4),
        (torch.bfloat16, torch.bfloat16, 1.0, 2),
        (torch.float32, torch.bfloat16, 1.0, 2),
        (torch.float32, torch.float32, 1 + 2**-7, 4),
    ],
)
def test_sums_are_computed_in_the_format_that_was_asked_for(
    rank_pool: Pools,
    parameters: torch.dtype,
    reduction: torch.dtype,
    expected: float,
    element_bytes: int,
) -> None:
    numbers = [2**-9, 2**-9, 1.0, 2**-8] if expected > 1 else [1.0, 2**-9, 2**-9, 2**-9]
    for value, num_bytes in rank_pool(4).run(_reduce_in, parameters, reduction, numbers):
        assert num_bytes == (8 + 1) * element_bytes
        if expected > 1:
            assert value == expected
        else:
            assert value != sum(numbers)


def _tiny(rank: int, _world_size: int) -> float:
    container = BucketedDataParallel(_Given(torch.float16), reduction_dtype=torch.float32)
    container(torch.full((8,), 1e-7, dtype=torch.float16)).backward()
    return float(container.module.weight.grad[0])


def test_a_share_too_small_for_the_gradients_format_is_not_lost(rank_pool: Pools) -> None:
    # The smallest float16 is 6e-8: a quarter of 1e-7 would underflow, four quarters make it again.
    for value in rank_pool(4).run(_tiny):
        assert value == pytest.approx(1.19e-7, rel=0.01)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.register_buffer("table", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def _buffers(rank: int, _world_size: int) -> None:
    torch.manual_seed(rank)
    ours = BucketedDataParallel(_Normed())
    require_identical(ours.module.table, "table")
    before = ours.module.norm.running_mean.clone()
    for step in range(2):
        ours(data(step, rank)).square().sum().backward()
    assert not torch.equal(before, ours.module.norm.running_mean)
    with torch.no_grad():
        ours.eval()(data(2, rank))
    ours.train()(data(3, rank) * 0)
    # All ranks copied rank 0's statistics before the last pass, and its input was identical on all.
    for name, buffer in ours.module.named_buffers():
        require_identical(buffer, name)


def test_buffers_follow_the_first_rank(rank_pool: Pools) -> None:
    rank_pool(2).run(_buffers)


def _state(rank: int, _world_size: int) -> None:
    ours, oracle = make_pair(rank, "tied", "ddp")
    assert list(ours.state_dict()) == list(oracle.state_dict())
    for value in oracle.state_dict().values():
        value.add_(1)
    ours.load_state_dict(oracle.state_dict())
    ours.module.load_state_dict(oracle.state_dict())
    require_equal(ours, oracle)
    outer = nn.ModuleDict({"inner": ours})
    assert list(outer.state_dict()) == [f"inner.{name}" for name in oracle.state_dict()]
    outer.load_state_dict({f"inner.{name}": value for name, value in oracle.state_dict().items()})
    names = [name for name, _ in ours.named_parameters()]
    assert names == [name for name, _ in oracle.named_parameters()]


def test_state_has_the_names_of_the_inner_module(rank_pool: Pools) -> None:
    rank_pool(2).run(_state)


def _groups(rank: int, _world_size: int, as_mesh: bool) -> None:
    if as_mesh:
        kind = devices.own_device().type
        mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("outer", "inner"))
        with pytest.raises(Exception, match="one dimension"):
            make_pair(rank, "layered", "ddp", process_group=mesh)
        group = mesh["inner"]
    else:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = groups[rank // 2]
    torch.manual_seed(rank)
    ours = BucketedDataParallel(Layered(), 0.001, process_group=group)
    torch.manual_seed(rank // 2 * 2)
    oracle = Layered()
    for index in (0, 1):
        other = rank // 2 * 2 + index
        (loss_of(oracle(data(0, other), other)) / 2).backward()
    loss_of(ours(data(0, rank), rank)).backward()
    for own, expected in zip(ours.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("as_mesh", [False, True])
def test_groups_average_among_themselves(rank_pool: Pools, as_mesh: bool) -> None:
    rank_pool(4).run(_groups, as_mesh)


def _unfreeze(rank: int, world_size: int) -> None:
    ours, oracle = make_pair(rank, "frozen", "ddp")
    optimizers = make_optimizer(ours), make_optimizer(oracle)
    for step in range(6):
        for model in (ours.module, oracle):
            model.second.weight.requires_grad_(step in (2, 3))
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        require_equal(ours, oracle)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def test_parameters_may_be_frozen_and_unfrozen(rank_pool: Pools) -> None:
    rank_pool(2).run(_unfreeze)


def _unfreeze_in_evaluation(rank: int, world_size: int, container: str) -> None:
    """Fine-tunes more and more layers in evaluation mode: no dropout, frozen statistics."""
    ours, oracle = make_pair(rank, "frozen", container)
    ours.eval()
    optimizers = make_optimizer(ours), make_optimizer(oracle)
    for step in range(4):
        for model in (ours.module, oracle):
            model.second.weight.requires_grad_(step > 0)
            model.first.requires_grad_(step > 1)
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        require_equal(ours, oracle)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("container", CONTAINERS)
def test_parameters_may_be_unfrozen_in_evaluation_mode(rank_pool: Pools, container: str) -> None:
    rank_pool(2).run(_unfreeze_in_evaluation, container)


def _freeze_for_evaluation(rank: int, world_size: int) -> None:
    """Freezes the model on rank 0 alone, to compute gradients of its input."""
    ours, oracle = make_pair(rank, "layered", "ddp")
    if rank == 0:
        ours.eval().requires_grad_(False)
        x = data(0, rank).requires_grad_()
        loss_of(ours(x, rank)).backward()
        ours.train().requires_grad_(True)
    loss_of(ours(data(1, rank), rank)).backward()
    oracle_backward(oracle, 1, world_size)
    require_equal(ours, oracle)


def test_a_rank_may_freeze_its_model_to_evaluate_alone(rank_pool: Pools) -> None:
    rank_pool(2).run(_freeze_for_evaluation)


class _Aliased(nn.Module):
    """A parameter that is also in a plain list, which torch does not track."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))
        self.weights = [self.weight]

    def forward(self, x: torch.Tensor, _rank: int) -> torch.Tensor:
        return x * self.weights[0]


def _alias(rank: int, world_size: int, container: str) -> None:
    ours, oracle = CONTAINERS[container](_Aliased()), _Aliased()
    loss_of(ours(data(0, rank), rank)).backward()
    oracle_backward(oracle, 0, world_size)
    require_equal(ours, oracle)
    assert ours.module.weights[0].grad is ours.module.weight.grad


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_parameter_may_be_kept_in_a_list_as_well(rank_pool: Pools, container: str) -> None:
    rank_pool(2).run(_alias, container)


def _statistics(rank: int, _world_size: int, container: str) -> None:
    ours, _ = make_pair(rank, "layered", container)
    loss_of(ours(data(0, rank), rank)).backward()
    assert ours.synchronization_stats() is None
    ours.record_statistics()
    for step in range(2):
        loss_of(ours(data(step, rank), rank)).backward()
    stats = ours.synchronization_stats()
    assert stats is not None
    num_bytes = sum(parameter.nbytes for parameter in ours.parameters())
    num_parameters = len(list(ours.parameters()))
    assert sum(bucket.num_parameters for bucket in stats.buckets) == num_parameters
    # One number per parameter follows the gradients.
    assert sum(bucket.num_bytes for bucket in stats.buckets) >= num_bytes + 4 * num_parameters
    launches = [bucket.launch_s for bucket in stats.buckets]
    assert launches == sorted(launches)
    for bucket in stats.buckets:
        assert 0 < bucket.launch_s < bucket.finish_s
        if not devices.is_accelerator():  # Whose streams each see the end of a message themselves.
            assert bucket.finish_s <= stats.backward_s + stats.exposed_wait_s
    late = [bucket for bucket in stats.buckets if bucket.launch_s > stats.backward_s]
    assert len(late) == (len(launches) if container in ("naive", "flat") else 0)


@pytest.mark.parametrize("container", CONTAINERS)
def test_statistics_say_what_was_sent_when(rank_pool: Pools, container: str) -> None:
    rank_pool(2).run(_statistics, container)


class _InsideAndOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        return self.layer(x)


def _inside_and_outside(rank: int, _world_size: int) -> None:
    ours = BucketedDataParallel(_InsideAndOutside())
    ours(data(0, rank)).sum().backward()


def test_a_gradient_that_comes_after_its_bucket_has_gone_is_refused_by_name() -> None:
    with DevicePool(2, timeout_s=60) as pool, pytest.raises(RankError, match=r"'layer\.\w+' got a"):
        pool.run(_inside_and_outside)


def _sparse(rank: int, _world_size: int) -> None:
    ours = BucketedDataParallel(nn.Embedding(10, 4, sparse=True))
    ours(torch.tensor([rank])).sum().backward()


def test_sparse_gradients_are_refused_by_name() -> None:
    with (
        DevicePool(2, timeout_s=60) as pool,
        pytest.raises(RankError, match=r"'weight' has a torch\.sp"),
    ):
        pool.run(_sparse)


def _unsupported(_rank: int, _world_size: int) -> None:
    for module, message in (
        (nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        (nn.LazyLinear(2), "'weight' has no shape yet"),
        (nn.GELU(), "no parameters"),
    ):
        with pytest.raises(Exception, match=message):
            BucketedDataParallel(module)
    with pytest.raises(Exception, match="bucket_size_mb must be a positive number"):
        BucketedDataParallel(nn.Linear(2, 2), 0)


def test_what_cannot_be_synchronised_is_refused_by_name(rank_pool: Pools) -> None:
    rank_pool(2).run(_unsupported)


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(Exception, match=r"inside distributed_session\(\)"):
        BucketedDataParallel(nn.Linear(2, 2))


def _break_off(ours: nn.Module, rank: int) -> None:
    """Makes a backward pass fail when it reaches the first layer."""

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("in the midst")

    handle = ours.module.first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="in the midst"):
        loss_of(ours(data(0, rank), rank)).backward()
    handle.remove()


def _broken_off(rank: int, world_size: int) -> str:
    """Fails on all ranks in the middle of backward, before any send, and continues."""
    ours, oracle = make_pair(rank, "layered", "one_bucket")
    _break_off(ours, rank)
    ours.zero_grad()
    loss_of(ours(data(1, rank), rank)).backward()
    oracle_backward(oracle, 1, world_size)
    require_equal(ours, oracle)
    return "went on"


def test_a_backward_that_broke_off_before_sending_can_be_repeated(rank_pool: Pools) -> None:
    assert rank_pool(2).run(_broken_off) == ["went on"] * 2


def _broken_off_while_sending(rank: int, _world_size: int) -> None:
    ours, _ = make_pair(rank, "layered", "overlapped")
    _break_off(ours, rank)
    loss_of(ours(data(1, rank), rank)).backward()


def test_a_backward_that_broke_off_while_sending_is_an_error() -> None:
    with (
        DevicePool(2, timeout_s=60) as pool,
        pytest.raises(RankError, match="was interrupted while"),
    ):
        pool.run(_broken_off_while_sending)


def _evaluate_on_one_rank(rank: int, _world_size: int) -> None:
    container = BucketedDataParallel(_Normed(), "auto")
    for step in range(4):
        container(data(step, rank)).square().sum().backward()
    if rank == 0:
        with torch.no_grad():
            container(data(5, rank))
        container.eval()(data(6, rank))
    dist.barrier()


def test_evaluation_does_not_communicate(rank_pool: Pools) -> None:
    rank_pool(2).run(_evaluate_on_one_rank)


def _two_forwards(rank: int, _world_size: int) -> None:
    container = BucketedDataParallel(_Normed())
    (container(data(0, rank)).sum() + container(data(1, rank)).square().sum()).backward()
    require_identical(container.module.norm.weight.grad, "gradient")


def test_two_forward_passes_before_one_backward(rank_pool: Pools) -> None:
    rank_pool(2).run(_two_forwards)


def _replaced_buffer(rank: int, _world_size: int) -> None:
    container = BucketedDataParallel(_Normed())
    container.module.norm.running_mean = torch.full((10,), float(rank))
    container(data(0, 0)).sum().backward()
    require_identical(container.module.norm.running_mean, "running mean")


def test_buffers_that_were_replaced_are_followed(rank_pool: Pools) -> None:
    rank_pool(2).run(_replaced_buffer)


def _replaced_parameters(rank: int, world_size: int, way: str) -> None:
    ours, oracle = make_pair(rank, "layered", "ddp")
    if way == "assigned":
        state = {name: value.clone() for name, value in oracle.state_dict().items()}
        ours.load_state_dict(state, assign=True)
    for step in range(3):
        loss_of(ours(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        require_equal(ours, oracle)
        if way == "moved":  # Conversion moves existing gradients to other memory.
            ours.to(memory_format=torch.channels_last)
            for parameter in ours.parameters():
                parameter.grad.data = parameter.grad.data.clone()
        for model in (ours, oracle):
            model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("way", ["assigned", "moved"])
def test_parameters_and_gradients_that_were_replaced_are_followed(
    rank_pool: Pools, way: str
) -> None:
    rank_pool(2).run(_replaced_parameters, way)


def _converted(rank: int, _world_size: int) -> None:
    ours, _ = make_pair(rank, "layered", "ddp")
    loss_of(ours(data(0, rank), rank)).backward()
    ours.double()
    loss_of(ours(data(0, rank).double(), rank)).backward()


def test_a_model_converted_after_wrapping_is_refused_by_name() -> None:
    with (
        DevicePool(2, timeout_s=60) as pool,
        pytest.raises(RankError, match=r"'\S+' was converted to torch\.float64"),
    ):
        pool.run(_converted)


def _wrap_again(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module, oracle = Layered(), Layered()
    oracle.load_state_dict(module.state_dict())
    first = BucketedDataParallel(module)
    with pytest.raises(Exception, match=r"'first\.weight' already belongs to another"):
        BucketedDataParallel(module)
    with pytest.raises(Exception, match="belongs to another"):
        BucketedDataParallel(nn.Sequential(first))
    loss_of(first(data(0, rank), rank)).backward()
    buffers = [weakref.ref(bucket) for bucket in first._synchronizer.buckets]
    module.zero_grad()
    del first
    assert not any(reference() for reference in buffers)  # Freed without the garbage collector.
    second = BucketedDataParallel(module)
    loss_of(second(data(1, rank), rank)).backward()
    oracle_backward(oracle, 1, world_size)
    require_equal(second, oracle)


def test_a_module_has_one_container_at_a_time_and_lets_go_of_it(rank_pool: Pools) -> None:
    rank_pool(2).run(_wrap_again)


class _Hidden:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class _Hiding(Layered):
    def forward(self, x: torch.Tensor, rank: int) -> _Hidden:
        return _Hidden(super().forward(x, rank))


def _hidden_outputs(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    ours = BucketedDataParallel(_Hiding(), 0.001)
    torch.manual_seed(0)
    oracle = Layered()
    with ours.no_sync():
        loss_of(ours(data(0, rank), rank).value).backward()
    loss_of(ours(data(1, rank), rank).value).backward()
    ours.finish_gradient_synchronization()
    assert ours.explain_unused() == []
    for step in (0, 1):
        oracle_backward(oracle, step, world_size)
    require_equal(ours, oracle)


def test_outputs_that_are_not_found_are_synchronised_all_the_same(rank_pool: Pools) -> None:
    rank_pool(2).run(_hidden_outputs)


def _gradient_penalty(rank: int, world_size: int) -> None:
    """Computes gradients of the input on rank 0 alone, which does not use up the weight."""
    ours, oracle = make_pair(rank, "layered", "ddp")
    ours.set_gradient_weight([1.0, 3.0][rank])
    x = data(0, rank).requires_grad_()
    if rank == 0:
        torch.autograd.grad(loss_of(ours(x, rank)), x)
    loss_of(ours(data(0, rank), rank)).backward()
    losses = [loss_of(oracle(data(0, other), other)) for other in range(world_size)]
    ((losses[0] + 3 * losses[1]) / 4).backward()
    require_equal(ours, oracle)


def test_gradients_of_the_input_alone_send_nothing(rank_pool: Pools) -> None:
    rank_pool(2).run(_gradient_penalty)


def _clip_and_scale(rank: int, world_size: int) -> None:
    ours, oracle = make_pair(rank, "layered", "ddp")
    scaler = torch.amp.GradScaler(devices.own_device().type, init_scale=1024.0)
    optimizers = make_optimizer(ours), make_optimizer(oracle)
    for step in range(3):
        scaler.scale(loss_of(ours(data(step, rank), rank))).backward()
        scaler.unscale_(optimizers[0])
        oracle_backward(oracle, step, world_size)
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (ours, oracle)]
        torch.testing.assert_close(norms[0], norms[1], atol=1e-6, rtol=1e-6)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        require_equal(ours, oracle)


def test_clipping_and_loss_scaling(rank_pool: Pools) -> None:
    rank_pool(3).run(_clip_and_scale)


def _refused(rank: int, _world_size: int) -> None:
    ours, _ = make_pair(rank, "layered", "ddp")
    for copy_ in (copy.deepcopy, pickle.dumps):
        with pytest.raises(Exception, match=r"copy or save its \.module"):
            copy_(ours)
    with pytest.raises(Exception, match="must not be negative"):
        ours.set_gradient_weight(-1.0)
    with pytest.raises(Exception, match="floating-point"):
        make_pair(rank, "layered", "ddp", reduction_dtype=torch.int32)
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(Exception, match="not in the process group"):
            make_pair(rank, "layered", "ddp", process_group=group)
    with pytest.raises(Exception, match="create_graph=True"):
        loss_of(ours(data(0, rank), rank)).backward(create_graph=True)


def test_what_makes_no_sense_is_refused(rank_pool: Pools) -> None:
    rank_pool(2).run(_refused)


def _nested_containers(rank: int, _world_size: int) -> None:
    container = BucketedDataParallel(nn.Linear(10, 10))
    x = data(0, rank).requires_grad_()
    container(checkpoint(container, x, use_reentrant=True)).sum().backward()


def test_a_reentrant_checkpoint_around_the_container_is_refused_by_name() -> None:
    with (
        DevicePool(2, timeout_s=60) as pool,
        pytest.raises(
            RankError, match=r"reentrant checkpoint around the whole container|got a sec"
        ),
    ):
        pool.run(_nested_containers)
