"""The container itself: who waits for which parameters, its messages' dtypes, and its errors."""

import copy
import dataclasses
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor

from paceline.core.errors import UsageError
from paceline.parallel import ShardedDataParallel, ShardedOptimizer
from paceline.parallel.zero import container as container_module
from paceline.parallel.zero.bucket import find_sharded_parameters
from paceline.parallel.zero.flat_parameters import FlatParameters
from tests.unit.parallel.simulation.device import Stream
from tests.unit.parallel.zero.ranks import (
    DECAYING,
    ONE_EACH,
    Parts,
    Twins,
    on_ranks,
    raw,
    zero_ranks,
)

pytestmark = pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")


class Raw(nn.Module):
    """A layer that reads its memory as code does that torch knows nothing of."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value))

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return x * self.weight


class Inner(nn.Module):
    """Two layers, of which one is read without a call, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unread = Raw(1.0), Raw(2.0), Raw(9.0)
        self.shift = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.first(x) * self.second.weight + self.shift


class Model(nn.Module):
    """Layers in layers."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.inner, self.end = Raw(0.5), Inner(), Raw(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.inner(self.start(x)))


def _loss(model: nn.Module, rank: int, number: int) -> Tensor:
    return model(torch.arange(4.0) + rank + number).square().mean()


def _train(
    rank: int, step: Callable[[ShardedDataParallel, int], object], **keywords: Any
) -> ShardedDataParallel:
    """Trains three steps; calls a function while parameters are in flight."""
    ours = ShardedDataParallel(Model(), ONE_EACH, **keywords)
    sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
    alone = Model()
    whole = SGD(alone.parameters(), lr=0.01)
    for number in range(3):
        _loss(ours, rank, number).backward()
        (sum(_loss(alone, other, number) for other in range(2)) / 2).backward()
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
                loss = _loss(ours, rank, number)
                known = {name.strip(): num for name, num in waits.items()}
                assert {name: known[name] for name in expected[number]} == expected[number]
                table = hooks._needed
                assert table is not None
                loss.backward()
                sharded.zero_grad()
            _loss(ours, rank, 3)
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
            _loss(ours, rank, number).backward()
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
            _loss(ours, rank, number).backward()
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
            _loss(ours, rank, 3)
        elif way == "a compiled wrapper":
            layer._modules["_orig_mod"] = nn.Identity()
            first = ours.module.start
            forward = first.forward
            first.forward = lambda x: (graph(x), forward(x))[1]  # type: ignore[method-assign]
            ours._gather_hooks._needed = {}  # As if the graph had no hooks.
            _loss(ours, rank, 3)
        else:
            ours.module.forward = graph  # type: ignore[method-assign]
            compiling.add(rank)
            _loss(ours, rank, 3)
            compiling.remove(rank)
        assert found == [True]

    on_ranks(2, program)


def test_hooks_do_nothing_while_a_graph_is_compiled(compiling: set[int]) -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        _loss(ours, rank, 0).backward()
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
        _loss(ours, rank, 0).backward()
        assert not calls
        ours.module.end._compiled_call_impl = None
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        sharded.step()
        _loss(ours, rank, 1)
        assert not calls
        ours.wait_for_parameters()

    on_ranks(2, program)


@pytest.mark.parametrize(
    ("keywords", "in_place", "expected"),
    [
        ({}, False, "bfloat16"),
        ({}, True, "bfloat16"),
        ({"master_dtype": torch.float32}, False, "bfloat16"),
        ({"master_dtype": torch.float32}, True, "float32"),
        ({"reduction_dtype": torch.float64}, False, "float64"),
        ({"reduction_dtype": torch.float64, "master_dtype": torch.float32}, True, "float64"),
        ({"reduction_dtype": torch.float32}, True, "float32"),
    ],
)
def test_the_dtype_of_messages(keywords: dict[str, Any], in_place: bool, expected: str) -> None:
    """Ranks that sum what they received do so in the master's dtype; NCCL sums in the message's."""
    with (
        zero_ranks(2) as ranks,
        mock.patch.object(container_module, "works_in_place", return_value=in_place),
    ):

        def program(rank: int) -> None:
            ours = ShardedDataParallel(Parts(dtype=torch.bfloat16), None, **keywords)
            ours(rank, 0).backward()
            ours.clip_grad_norm_(1.0)
            sent = [event for event in ranks.events[rank] if "reduce-scatter" in event]
            assert sent[0] == f"send reduce-scatter 64 {expected}"

        ranks.run(program)


def test_waits_for_parameters_count_as_exposed() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        assert ours.synchronization_stats() is None
        for number in range(2):
            if number == 1:
                ours.record_statistics()
            _loss(ours, rank, number).backward()
            assert (ours.synchronization_stats() is None) == (number == 0)
            sharded.step()
            sharded.zero_grad()
        waits = [flat.arriving for flat in ours._shared.flats]
        assert all(arriving.is_timed for arriving in waits)
        _loss(ours, rank, 2).backward()
        assert len(ours._forward_waits) == 6
        assert not any(arriving.waits for arriving in waits)
        stats = ours.synchronization_stats()
        ours._forward_waits = []
        without = ours.synchronization_stats()
        assert stats is not None
        assert without is not None
        assert stats.exposed_wait_s > without.exposed_wait_s
        ours._forward_waits = [(1.0, 3.0), (5.0, 5.5)]
        stats = ours.synchronization_stats()
        assert stats is not None
        assert stats.exposed_wait_s == pytest.approx(without.exposed_wait_s + 2.5)
        assert stats.buckets == without.buckets
        # A forward pass that waited for nothing.
        _loss(ours, rank, 3).backward()
        assert ours._forward_waits == []
        ours.record_statistics(False)
        sharded.step()
        sharded.zero_grad()
        _loss(ours, rank, 4).backward()
        assert ours.synchronization_stats() is None
        sharded.zero_grad()

    on_ranks(2, program)


def test_statistics_that_are_turned_off_time_no_waits() -> None:
    def program(_rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        ours.record_statistics(False)
        assert not any(flat.arriving.is_timed for flat in ours._shared.flats)

    on_ranks(2, program)


def test_statistics_whose_waits_are_unknown_stay_so() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        twins.ours.record_statistics()
        twins.backward(0)
        stats = twins.ours.synchronization_stats()
        assert stats is not None
        with mock.patch.object(
            container_module.DataParallel,
            "synchronization_stats",
            return_value=dataclasses.replace(stats, exposed_wait_s=None),
        ):
            unknown = twins.ours.synchronization_stats()
        assert unknown is not None
        assert unknown.exposed_wait_s is None
        twins.sharded.zero_grad()

    on_ranks(2, program)


def test_a_pass_after_one_without_an_optimizer_is_refused() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model())
        for _ in range(2):  # Passes that are not averaged need no optimizer.
            with ours.no_sync():
                _loss(ours, rank, 0).backward()
        ours.zero_grad()
        with torch.no_grad():
            _loss(ours, rank, 0)
        _loss(ours, rank, 0).backward()
        ours.clip_grad_norm_(1.0)
        with pytest.raises(UsageError, match="no ShardedOptimizer updates the shards"):
            _loss(ours, rank, 1)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)
        _loss(ours, rank, 1).backward()
        sharded.zero_grad()
        del sharded
        gc.collect()
        with pytest.raises(UsageError, match="no ShardedOptimizer updates the shards"):
            _loss(ours, rank, 2)

    on_ranks(2, program)


def test_parameters_without_shards_must_not_be_trained() -> None:
    def program(rank: int) -> None:
        model = Model()
        model.end.weight.requires_grad_(False)
        ours = ShardedDataParallel(model, ONE_EACH)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        for number in range(2):
            _loss(ours, rank, number).backward()
            sharded.step()
            sharded.zero_grad()
        assert bool((model.end.weight == 4).all())
        # A known parameter may be frozen and trained again.
        for trained in (False, True):
            model.start.weight.requires_grad_(trained)
            _loss(ours, rank, 2).backward()
            sharded.zero_grad()
        model.end.weight.requires_grad_(True)
        with pytest.raises(
            UsageError, match=r"parameter 'end.weight' was frozen or not in the mod"
        ):
            _loss(ours, rank, 3)
        model.end.weight.requires_grad_(False)
        model.extra = Raw(1.0)
        with pytest.raises(UsageError, match=r"'extra.weight' .* wrap the model again"):
            _loss(ours, rank, 3)

    on_ranks(2, program)


def test_a_container_has_one_optimizer() -> None:
    def program(_rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        parameters = list(ours.parameters())
        with pytest.raises(UsageError, match="works only with an elementwise optimizer"):
            ShardedOptimizer(parameters, Adafactor)
        first = ShardedOptimizer(parameters[:2], SGD, lr=0.1)
        first.add_param_group({"params": parameters[2:]})
        with pytest.raises(UsageError, match="already belong to another ShardedOptimizer"):
            ShardedOptimizer(parameters, SGD, lr=0.1)
        # One that only a reference cycle holds is gone.
        first.cycle = first  # type: ignore[attr-defined]
        gc.disable()
        try:
            del first
            ShardedOptimizer(parameters, SGD, lr=0.1)
        finally:
            gc.enable()

    on_ranks(2, program)


def test_a_second_optimizer_collects_no_garbage_without_a_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collecting takes long in a large program."""
    collected: list[int] = []

    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        monkeypatch.setattr(gc, "collect", lambda *_: collected.append(rank))
        sharded = ShardedOptimizer(list(ours.parameters())[:2], SGD, lr=0.1)
        sharded.add_param_group({"params": list(ours.parameters())[2:]})

    on_ranks(2, program)
    assert not collected


def test_only_a_containers_parameters_have_a_container() -> None:
    def program(_rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        parameter = next(ours.parameters())
        assert find_sharded_parameters(parameter) is ours._shared
        assert find_sharded_parameters(nn.Parameter(torch.ones(1))) is None
        del ours
        gc.collect()
        assert find_sharded_parameters(parameter) is None

    on_ranks(1, program)


def test_a_copy_of_the_module_has_idle_hooks() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.01)
        _loss(ours, rank, 0).backward()
        sharded.step()
        ours.wait_for_parameters()
        average = copy.deepcopy(ours.module)
        _loss(ours, rank, 1).backward()
        sharded.step()
        _loss(average, rank, 0).backward()
        average.load_state_dict(average.state_dict())
        assert ours._shared.are_in_flight
        ours.wait_for_parameters()

    on_ranks(2, program)


def test_a_module_that_outlives_its_container_is_plain() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(Model(), ONE_EACH)
        model = ours.module
        _loss(ours, rank, 0).backward()
        ours.clip_grad_norm_(1.0)
        del ours
        gc.collect()
        model.zero_grad()
        _loss(model, rank, 0).backward()
        model.load_state_dict(model.state_dict())
        SGD(model.parameters(), lr=0.1).step()

    on_ranks(2, program)


def test_settings_that_differ_between_ranks_are_named() -> None:
    def program(rank: int) -> None:
        dtype = torch.float32 if rank else None
        with pytest.raises(Exception, match="master"):
            ShardedDataParallel(Parts(dtype=torch.bfloat16), master_dtype=dtype)

    on_ranks(2, program)


def test_a_graph_of_old_values_is_refused() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        loss = twins.ours(rank, 0)
        loss.backward(retain_graph=True)
        twins.sharded.step()
        twins.ours.wait_for_parameters()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    on_ranks(1, program)


MASTER: dict[str, Any] = {"master_dtype": torch.float32}


def _bf16() -> nn.Module:
    return Parts(dtype=torch.bfloat16)


def test_a_master_keeps_what_rounding_would_lose() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(_bf16(), 64 / 2**20, **MASTER)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=2.0**-12)
        masters = {
            index: [parameter.detach().float().clone()]
            for index, parameter in enumerate(ours.parameters())
        }
        for _ in range(20):
            for index, parameter in enumerate(ours.parameters()):
                parameter.grad = torch.full_like(parameter, 1.0 + index)
            sharded.step()
            sharded.zero_grad()
            ours.wait_for_parameters()
        for index, parameter in enumerate(ours.parameters()):
            expected = masters[index][0] - 20 * 2.0**-12 * (1.0 + index)
            torch.testing.assert_close(parameter.detach(), expected.bfloat16(), rtol=0, atol=0)
        for shard in sharded.shards():
            assert shard.tensor.dtype == torch.float32
        kept = sharded.state_tensors()
        assert sum(t.numel() for t in kept) == sum(f.master.numel() for f in ours._shared.flats)

    on_ranks(2, program)


def _fill(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)


EDITS: dict[str, Callable[[nn.Module], object]] = {
    "load_state_dict": lambda model: model.load_state_dict(
        {name: torch.full_like(p, 5.0) for name, p in model.named_parameters()}
    ),
    "load_state_dict of layers": lambda model: [
        part.load_state_dict({"value": torch.full_like(part.value, 5.0)}) for part in model.parts
    ],
    "in place": _fill,
}


@pytest.mark.parametrize("when", ["before the first pass", "before the step", "after the step"])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_reach_the_master(edit: str, when: str) -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(_bf16(), 64 / 2**20, **MASTER)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.0)
        if when == "before the first pass":
            EDITS[edit](ours.module)
        for number in range(3):
            ours(rank, number).backward()
            if (number, when) == (1, "before the step"):
                EDITS[edit](ours.module)
            sharded.step()
            sharded.zero_grad()
            if (number, when) == (1, "after the step"):
                EDITS[edit](ours.module)
        for parameter in ours.parameters():
            assert bool((parameter == 5.0).all())
        assert all(bool((shard.tensor == 5.0).all()) for shard in sharded.shards())

    on_ranks(2, program)


def test_loading_reaches_the_master_at_once_and_spares_what_is_equal() -> None:
    def program(rank: int) -> None:
        ours = ShardedDataParallel(_bf16(), None, **MASTER)
        (flat,) = ours._shared.flats
        precise = flat.master + 2.0**-12 * flat.master
        flat.master.copy_(precise)
        changed = ours.module.parts[1].value
        state = {name: p.detach().clone() for name, p in ours.named_parameters()}
        state["parts.1.value"].add_(1.0)
        ours.module.load_state_dict(state)
        begin = flat.layout.borders[rank]
        for shard_slice in flat.layout.slices(rank):
            own = slice(
                shard_slice.offset - begin,
                shard_slice.offset - begin + shard_slice.end - shard_slice.start,
            )
            if shard_slice.tensor == 1:
                new = changed.detach().float().view(-1)[shard_slice.start : shard_slice.end]
                assert torch.equal(flat.master[own], new)
            else:
                assert torch.equal(flat.master[own], precise[own])

    on_ranks(2, program)


def test_masters_are_compared_only_after_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison reads all of a rank's parameters."""
    compared: list[int] = []
    refresh = FlatParameters.refresh_master

    def noted(flat: FlatParameters) -> None:
        compared.append(dist.get_rank())
        refresh(flat)

    monkeypatch.setattr(FlatParameters, "refresh_master", noted)

    def program(rank: int) -> None:
        ours = ShardedDataParallel(_bf16(), None, **MASTER)
        sharded = ShardedOptimizer(ours.parameters(), SGD, lr=0.1)

        def num_compared(number: int) -> int:
            before = compared.count(rank)
            ours(rank, number).backward()
            sharded.step()
            sharded.zero_grad()
            return compared.count(rank) - before

        assert [num_compared(number) for number in range(3)] == [0, 0, 0]
        _fill(ours)
        assert [num_compared(number) for number in range(2)] == [1, 0]
        ours.load_state_dict(ours.state_dict())  # Compares by itself.
        assert [num_compared(number) for number in range(2)] == [0, 0]
        ours.wait_for_parameters()

    on_ranks(2, program)


def test_a_master_of_the_parameters_own_dtype_is_none() -> None:

    def program(rank: int) -> None:
        twins = Twins(rank, 2, options=DECAYING, master_dtype=torch.float32)
        assert not any(flat.has_master for flat in twins.flats)
        twins.backward(0)
        twins.step()
        twins.require_equal()

    on_ranks(2, program)
