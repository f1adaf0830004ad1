"""Who waits for which parameters in flight, and who does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from paceline.parallel import ShardedDataParallel, ShardedOptimizer
from paceline.parallel.zero.bucket import find_sharded_parameters
from tests.unit.parallel.simulation.device import Stream
from tests.unit.parallel.zero.layers import Model, loss_of
from tests.unit.parallel.zero.ranks import ONE_EACH, Twins, on_ranks, raw, zero_ranks

pytestmark = pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")


def _train(
    rank: int, step: Callable[[ShardedDataParallel, int], object], **keywords: Any
) -> ShardedDataParallel:
    """Trains three steps; calls a function while parameters are in flight."""
    ours = ShardedDataParallel(Model(), ONE_EACH, **keywords)
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
    alone = Model()
    whole = SGD(alone.parameters(), lr=0.01)
    for number in range(3):
        loss_of(ours, rank, number).backward()
        (sum(loss_of(alone, other, number) for other in range(2)) / 2).backward()
        for optimizer in (sharded, whole):
            optimizer.step()
            optimizer.zero_grad()
        step(ours, number)
    for own, expected in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), expected.detach())
    return ours


def test_no_layer_reads_what_is_in_flight() -> None:
    """Neither a layer that is called, nor its caller that reads it, in any schedule."""
    with zero_ranks(2) as ranks:
        for seed in range(3):
            ranks.run(lambda rank: _train(rank, lambda *_: None) and None, seed)


def test_each_layer_waits_only_for_what_it_reads() -> None:
    with zero_ranks(2) as ranks:

        def program(rank: int) -> None:
            model = Model()
            waits: dict[str, int] = {}

            def note(name: str) -> Callable[..., None]:
                def hook(*_: object) -> None:
                    waits[name] = ranks.events[rank].count("wait all-gather")

                return hook

            for name, module in model.named_modules():
                # Registered before the container's own, yet it finds the values there.
                module.register_forward_pre_hook(note(f"{name} begins"))
                module.register_forward_hook(note(f"{name} ends"))
            ours = ShardedDataParallel(model, ONE_EACH)
            sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
            expected = {
                # All six parameters, because it is not known yet who reads what.
                0: {"begins": 6, "start begins": 6, "end ends": 6, "ends": 6},
                1: {
                    # The model itself has none. `inner` reads its own, and the two that nobody
                    # calls; its first layer waits for its own.
                    "begins": 0,
                    "start begins": 1,
                    "inner begins": 4,
                    "inner.first begins": 5,
                    "inner ends": 5,
                    "end begins": 6,
                    "ends": 6,
                },
            }
            for number in range(2):
                for parameter in model.parameters():
                    parameter.grad = torch.ones(4)
                sharded.step()
                sharded.zero_grad()
                hooks = ours._gather_hooks
                ranks.events[rank].clear()
                loss = loss_of(ours, rank, number)
                known = {name.strip(): num for name, num in waits.items()}
                assert {name: known[name] for name in expected[number]} == expected[number]
                table = hooks._needed
                assert table is not None
                loss.backward()
                sharded.zero_grad()
            loss_of(ours, rank, 3)
            assert hooks._needed is table

        ranks.run(program)


def test_hooks_before_a_call_see_plain_parameters() -> None:
    def program(rank: int) -> None:
        model = Model()
        seen: list[bool] = []
        model.start.register_forward_pre_hook(
            lambda layer, _: seen.append(type(layer.weight) is nn.Parameter)
        )
        ours = ShardedDataParallel(model, ONE_EACH)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        for number in range(3):
            loss_of(ours, rank, number).backward()
            sharded.step()
        ours.wait_for_parameters()
        assert seen == [True] * 3

    on_ranks(2, program)


def _is_settled(model: nn.Module) -> bool:
    return all(type(parameter) is nn.Parameter for parameter in model._parameters.values())


WAITERS: dict[str, Callable[[ShardedDataParallel], object]] = {
    "wait_for_parameters": lambda ours: ours.wait_for_parameters(),
    "named_parameters": lambda ours: list(ours.named_parameters()),
    "state_dict of the module": lambda ours: ours.module.state_dict(keep_vars=True),
    "state_dict of a layer": lambda ours: ours.module.start.state_dict(keep_vars=True),
    "load_state_dict of a layer": lambda ours: ours.module.start.load_state_dict({}, strict=False),
    "evaluation of the module": lambda ours: ours.module(torch.ones(4)),
    "evaluation of a layer": lambda ours: ours.module.start(torch.ones(4)),
}


@pytest.mark.parametrize("waiter", WAITERS)
def test_who_waits(waiter: str) -> None:
    def program(rank: int) -> None:
        def check(ours: ShardedDataParallel, _number: int) -> None:
            start = ours.module.start
            assert not _is_settled(start)
            assert ours._shared.are_in_flight
            with torch.no_grad():
                WAITERS[waiter](ours)
            assert _is_settled(start)

        _train(rank, check).wait_for_parameters()

    on_ranks(2, program)


def test_a_step_in_another_stream_is_ordered_after_the_values() -> None:
    with zero_ranks(2) as ranks:

        def program(rank: int) -> None:
            twins = Twins(rank, 2)
            twins.backward(0)
            twins.step()
            twins.ours.wait_for_parameters()
            for model in (twins.ours.module, twins.alone):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            ranks.events[rank].clear()
            with ranks.device.stream(Stream(computes=True)):
                twins.step()
                sent = [event.partition(" ")[0] for event in ranks.events[rank]]
                assert sent == ["wait"] * 3 + ["send"] * 3
                twins.ours.wait_for_parameters()
            twins.ours.wait_for_parameters()
            twins.require_equal()

        ranks.run(program)


def test_names_and_gradients_are_read_without_a_wait() -> None:
    def program(rank: int) -> None:
        def check(ours: ShardedDataParallel, _number: int) -> None:
            ours.zero_grad()
            ours.zero_grad(set_to_none=False)
            assert ours._shared.are_in_flight
            assert all(find_sharded_parameters(p) is ours._shared for p in ours.module.parameters())
            assert ours._shared.are_in_flight

        _train(rank, check)

    on_ranks(2, program)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ranks that compile at the moment."""
    ranks: set[int] = set()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: dist.get_rank() in ranks)
    return ranks


@pytest.mark.parametrize("way", ["a compiled layer", "a compiled wrapper", "a compiled container"])
def test_compiled_code_finds_all_values(compiling: set[int], way: str) -> None:
    """Layers in a compiled graph have no hooks; the container waits before it calls them."""

    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        for number in range(3):
            loss_of(ours, rank, number).backward()
            sharded.step()
            sharded.zero_grad()
            assert ours._shared.are_in_flight
        # One that is not the first of the module's layers.
        layer = ours.module.end
        found: list[bool] = []

        def graph(x: Tensor) -> Tensor:
            found.append(all(bool(raw(p).isfinite().all()) for p in ours.module.parameters()))
            return layer.forward(x)

        if way == "a compiled layer":
            layer._compiled_call_impl = graph  # type: ignore[assignment]
            loss_of(ours, rank, 3)
        elif way == "a compiled wrapper":
            layer._modules["_orig_mod"] = nn.Identity()
            first = ours.module.start
            forward = first.forward
            first.forward = lambda x: (graph(x), forward(x))[1]  # type: ignore[method-assign]
            ours._gather_hooks._needed = {}  # As if the graph had no hooks.
            loss_of(ours, rank, 3)
        else:
            ours.module.forward = graph  # type: ignore[method-assign]
            compiling.add(rank)
            loss_of(ours, rank, 3)
            compiling.remove(rank)
        assert found == [True]

    on_ranks(2, program)


def test_hooks_do_nothing_while_a_graph_is_compiled(compiling: set[int]) -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        loss_of(ours, rank, 0).backward()
        sharded.step()
        compiling.add(rank)
        ours.module.start(torch.ones(4))
        assert ours._shared.are_in_flight
        compiling.remove(rank)
        ours.module.start(torch.ones(4))
        assert _is_settled(ours.module.start)
        ours.wait_for_parameters()

    on_ranks(2, program)


def test_nothing_compiled_and_nothing_in_flight_waits_for_nothing() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        calls: list[int] = []
        ours._wait_before_compiled_code = lambda: calls.append(rank)
        ours.module.end._compiled_call_impl = ours.module.end.forward  # type: ignore[assignment]
        loss_of(ours, rank, 0).backward()
        assert not calls
        ours.module.end._compiled_call_impl = None
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        sharded.step()
        loss_of(ours, rank, 1)
        assert not calls
        ours.wait_for_parameters()

    on_ranks(2, program)
