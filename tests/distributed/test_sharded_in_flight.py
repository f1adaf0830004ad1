"""Parameters are in flight between a step and the next forward pass; any read waits for them."""

import contextlib
import copy
import io
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline.devices import accelerator
from paceline.parallel import RankPool, ShardedDataParallel, ShardedOptimizer
from paceline.parallel.ranks.collectives import start_all_gather
from paceline.parallel.ranks.pending import Pending
from paceline.parallel.zero import flat_parameters
from paceline.parallel.zero.flat_parameters import ArrivingParameters
from tests.distributed.toys import WIDTH, Layered, data, loss_of, oracle_backward

Pools = Callable[[int], RankPool]

SMALL_BUCKET_MB = 0.0016


def _spoil_what_is_in_flight(
    flat: Tensor, borders: Sequence[int], group: dist.ProcessGroup
) -> Pending:
    """Gathers into separate memory; parameters in flight are NaN until a wait."""
    arriving = flat.clone()
    pending = start_all_gather(arriving, borders, group)
    flat.fill_(float("nan"))
    wait = pending.wait

    def wait_and_arrive() -> None:
        wait()
        flat.copy_(arriving)

    pending.wait = wait_and_arrive  # type: ignore[method-assign]
    return pending


@contextlib.contextmanager
def spoilt_in_flight() -> Iterator[None]:
    before = flat_parameters.start_all_gather
    flat_parameters.start_all_gather = _spoil_what_is_in_flight
    try:
        yield
    finally:
        flat_parameters.start_all_gather = before


def _saved(value: Any) -> Any:
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return torch.load(content, weights_only=False)


def _broadcast(value: Tensor) -> Tensor:
    dist.broadcast(value.detach(), 0)
    return value


READERS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "arithmetic": lambda p: p + 0,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "numpy": lambda p: torch.tensor(p.detach().cpu().numpy()),
    "item": lambda p: torch.tensor([float(x) for x in p.flatten()]).view(p.shape),
    "a list of tensors": lambda p: torch._foreach_add([p], 0.0)[0],
    "a keyword": lambda p: torch.add(input=torch.zeros(()), other=p),
    "copy_": lambda p: torch.empty(p.shape).copy_(p),
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": _saved,
    "broadcast": _broadcast,
}


def _read(rank: int, _world_size: int) -> None:
    ours = ShardedDataParallel(Layered(), SMALL_BUCKET_MB)
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)
    parameters = list(ours.parameters())
    identities = [id(parameter) for parameter in parameters]
    known = set(parameters)
    with spoilt_in_flight():
        for name, read in READERS.items():
            loss_of(ours(data(0, rank), rank)).backward()
            sharded.step()
            in_flight = type(parameters[0])
            assert in_flight is not nn.Parameter
            assert isinstance(parameters[0], nn.Parameter)
            sharded.zero_grad()  # Needs no values, so it does not wait.
            assert all(p.grad is None and p.requires_grad for p in parameters)
            assert type(parameters[0]) is in_flight
            for parameter in parameters:
                value = read(parameter)
                assert bool(value.isfinite().all()), name
                assert type(parameter) is nn.Parameter
                assert type(value) in (Tensor, nn.Parameter), name
                assert torch.equal(value, parameter), name
            assert known == set(ours.parameters())
            assert identities == [id(parameter) for parameter in ours.parameters()]


def test_whatever_reads_a_parameter_waits(rank_pool: Pools) -> None:
    rank_pool(2).run(_read)


class ReadsAhead(nn.Module):
    """Reads the weight of a layer that it calls later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x) @ self.head.weight)


def _train(rank: int, world_size: int, model: type[nn.Module], compiled: str, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    inner = model()
    ours = ShardedDataParallel(inner, SMALL_BUCKET_MB / 8)
    torch.manual_seed(0)
    oracle = model()
    call: Callable[..., Tensor] = ours
    if compiled == "container":
        call = torch.compile(ours, backend=backend)
    elif compiled == "module":
        inner.compile(backend=backend)
    elif compiled == "layers":
        for layer in inner.children():
            layer.compile(backend=backend)
    elif compiled == "function":
        call = torch.compile(lambda x: ours(x), backend=backend)
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)
    whole = SGD(oracle.parameters(), lr=0.1)
    with spoilt_in_flight():
        for step in range(4):
            call(data(step, rank)).square().mean().backward()
            inputs = [data(step, other) for other in range(world_size)]
            (sum(oracle(x).square().mean() for x in inputs) / world_size).backward()
            for optimizer in (sharded, whole):
                optimizer.step()
                optimizer.zero_grad()
            if step % 2:
                with torch.no_grad():
                    torch.testing.assert_close(call(data(9, 0)), oracle(data(9, 0)))
        for own, expected in zip(inner.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(own, expected)


def test_a_weight_is_read_before_its_layer_is_called(rank_pool: Pools) -> None:
    rank_pool(2).run(_train, ReadsAhead, "nothing", "")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("compiled", ["container", "module", "layers", "function"])
@pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")
def test_compiled_code_reads_what_has_arrived(
    rank_pool: Pools, compiled: str, backend: str
) -> None:
    rank_pool(2).run(_train, ReadsAhead, compiled, backend)


def _average(rank: int, _world_size: int) -> None:
    ours = ShardedDataParallel(Layered(), SMALL_BUCKET_MB)
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)
    # With a decay of 0 the average is a copy.
    average = AveragedModel(ours.module, multi_avg_fn=get_ema_multi_avg_fn(0.0))
    with spoilt_in_flight():
        for step in range(3):
            loss_of(ours(data(step, rank), rank)).backward()
            sharded.step()
            average.update_parameters(ours.module)
            for own, other in zip(ours.parameters(), average.parameters(), strict=True):
                assert torch.equal(own, other)
        loss_of(ours(data(3, rank), rank)).backward()
        sharded.step()
        for own, other in zip(
            copy.deepcopy(ours.module).parameters(), ours.parameters(), strict=True
        ):
            assert torch.equal(own, other)


def test_an_average_of_the_inner_module_waits(rank_pool: Pools) -> None:
    rank_pool(2).run(_average)


def _drop_in_flight(rank: int, world_size: int) -> None:
    inner = Layered()
    ours = ShardedDataParallel(inner, SMALL_BUCKET_MB)
    oracle = copy.deepcopy(inner)
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)
    whole = SGD(oracle.parameters(), lr=0.1)
    loss_of(ours(data(0, rank), rank)).backward()
    oracle_backward(oracle, 0, world_size)
    with spoilt_in_flight():
        sharded.step()
    whole.step()
    del ours, sharded
    for own, expected in zip(inner.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


def test_parameters_arrive_although_their_container_is_gone(rank_pool: Pools) -> None:
    rank_pool(2).run(_drop_in_flight)


def _time_waits(rank: int, _world_size: int) -> float:
    ours = ShardedDataParallel(Layered())
    ours.record_statistics()
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)
    for step in range(2):
        loss_of(ours(data(step, rank), rank)).backward()
        time.sleep(0.4 * rank)  # The other rank has to wait for this one's parameters.
        sharded.step()
    loss_of(ours(data(2, rank), rank)).backward()
    stats = ours.synchronization_stats()
    assert stats is not None
    return stats.exposed_wait_s


def test_what_forward_waits_for_parameters_is_exposed(rank_pool: Pools) -> None:
    first, _ = rank_pool(2).run(_time_waits)
    assert first > 0.2


def _wait_in_streams() -> list[str]:
    log: list[str] = []

    class Work:
        def wait(self) -> None:
            log.append(stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "current_stream", lambda _device: stream)
        stream = "compute"
        pending = Pending("all-gather", 0, [Work()], torch.device("cpu"))  # type: ignore[list-item]
        parameter = nn.Parameter(torch.ones(2))
        arriving = ArrivingParameters([parameter], torch.device("cpu"))
        arriving.start(pending)
        stream = "side"
        parameter.detach()
        parameter.detach()
        torch._foreach_add([parameter], 1.0)
        assert type(parameter) is not nn.Parameter  # The compute stream has yet to wait.
        stream = "compute"
        parameter.detach()
        assert type(parameter) is nn.Parameter
        stream = "another"
        arriving.wait()
    return log


def test_every_stream_of_a_gpu_waits_by_itself() -> None:
    assert _wait_in_streams() == ["side", "compute", "another"]
