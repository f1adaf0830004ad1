"""The gradients and values of the fully sharded container against one process with all data."""

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from paceline.devices import accelerator
from paceline.parallel import FullyShardedDataParallel
from paceline.parallel.buckets import GradientError
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.fsdp.layers import WrapPolicy
from tests.unit.parallel.fsdp.ranks import (
    Blocks,
    Ranks,
    data,
    fsdp_ranks,
    own_rows,
    require_gradients,
    require_values,
    silent,
)
from tests.unit.parallel.simulation.device import Event, Stream
from tests.unit.parallel.simulation.messages import Region


class Shapes(nn.Module):
    """Sizes that do not divide, no elements, a scalar, strides, two dtypes, and a mebibyte."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.few = nn.Parameter(torch.randn(2, 5))
        self.turned = nn.Parameter(torch.randn(7, 4).T)
        self.stepped = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.large = nn.Parameter(torch.randn(4, 256 * 256) / 64)
        self.larger = nn.Parameter(torch.randn(7, 256 * 256) / 64)
        self.precise = nn.Parameter(torch.randn(7, 3, dtype=torch.float64))
        self.idle = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.frozen + self.empty.sum()
        y = F.gelu(x @ self.weight.T) @ self.few.T + (x @ self.turned).sum(-1, keepdim=True)
        z = ((x @ self.turned).double() @ self.precise).float() + x @ self.stepped
        wide = (x @ self.large + (x @ self.turned) @ self.larger).square().mean()
        return self.scale * (y.sum() + z.square().sum()) + wide


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_shape_trains_as_in_one_process(num_ranks: int) -> None:
    def program(rank: int) -> None:
        model = Shapes()
        if rank:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.fill_(rank)  # All ranks get the values of the first.
        ours, oracle = FullyShardedDataParallel(model), Shapes()
        require_values(ours, oracle, 0)
        optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.01, weight_decay=0.1) for m in (ours, oracle)
        ]
        for step in range(2):
            ours(data(step, rank)).backward()
            for other in range(num_ranks):
                (oracle(data(step, other)) / num_ranks).backward()
            require_gradients(ours, oracle, rank, num_ranks, 1e-4)
            for name, parameter in ours.named_parameters():
                full = dict(oracle.named_parameters())[name]
                assert parameter.requires_grad == full.requires_grad
                assert (parameter.shape, parameter.dtype) == (full.shape, full.dtype)
                if parameter.grad is not None:
                    assert parameter.grad.shape == full.shape
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            require_values(ours, oracle, 1e-4)

    with fsdp_ranks(num_ranks) as ranks:
        for seed in range(2):
            ranks.run(program, seed)


def test_gradients_accumulate_over_synchronised_passes() -> None:
    def program(rank: int) -> None:
        ours, oracle = FullyShardedDataParallel(Blocks(silent, 3)), Blocks(silent, 3)
        addresses = None
        for step in range(3):
            ours(data(step, rank)).sum().backward()
            for other in range(2):
                (oracle(data(step, other)).sum() / 2).backward()
            require_gradients(ours, oracle, rank, 2)
            found = [local_tensor(parameter.grad).data_ptr() for parameter in ours.parameters()]
            assert addresses in (None, found)  # They are added to what is there.
            addresses = found

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


class Chosen(nn.Module):
    """Three parameters of one layer, of which the loss uses those that the caller names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(size)) for size in (3, 5, 1))

    def forward(self, x: Tensor, used: str) -> Tensor:
        y = x.sum()
        for name in used:
            y = y * (1 + getattr(self, name).square().sum())
        return y


@pytest.mark.parametrize(
    "used",
    [("abc", "abc"), ("ab", "bc"), ("a", "b"), ("c", "ab"), ("ab", "ab"), ("", ""), ("b", "abc")],
)
def test_a_parameter_has_a_gradient_if_any_rank_had_one(used: tuple[str, str]) -> None:
    def program(rank: int) -> list[tuple[str, tuple[int, ...]]]:
        ours, oracle = FullyShardedDataParallel(Chosen()), Chosen()
        for step in range(2):
            x = data(step, rank).requires_grad_()
            ours(x, used[rank]).backward()
            for other in range(2):
                (oracle(data(step, other).requires_grad_(), used[other]) / 2).backward()
        require_gradients(ours, oracle, rank, 2, 1e-5)
        return [(unused.name, unused.ranks) for unused in ours.explain_unused()]

    with fsdp_ranks(2) as ranks:
        first, second = ranks.run(program)
    assert first == second
    if used != ("", ""):
        assert first == [
            (name, missing)
            for name in "abc"
            if (missing := tuple(rank for rank in range(2) if name not in used[rank]))
        ]


def test_gradients_of_passes_without_synchronisation_are_added_to_those_of_the_next() -> None:
    def program(rank: int, order: tuple[str, ...]) -> None:
        ours, oracle = FullyShardedDataParallel(Chosen()), Chosen()
        for _ in range(2):
            *local, last = order
            with ours.no_sync():
                for step, used in enumerate(local):
                    ours(data(step, rank), used).backward()
            ours(data(9, rank), last).backward()
            for other in range(2):
                for step, used in (*enumerate(local), (9, last)):
                    (oracle(data(step, other), used) / 2).backward()
            require_gradients(ours, oracle, rank, 2, 1e-5)

    for order in (("abc", "abc"), ("a", "b", "c"), ("ab", "bc"), ("abc", "a"), ("a", "ab", "abc")):
        with fsdp_ranks(2) as ranks:
            ranks.run(lambda rank, order=order: program(rank, order))


@pytest.mark.parametrize("weights", [(3.0, 1.0), (0.0, 2.0), (0.0, 0.0)])
def test_ranks_count_for_their_weights_in_one_pass(weights: tuple[float, float]) -> None:
    total = sum(weights)
    shares = [weight / total if total else 0.5 for weight in weights]

    def program(rank: int) -> None:
        ours, oracle = FullyShardedDataParallel(Chosen()), Chosen()
        ours.set_gradient_weight(weights[rank])
        loss = ours(data(0, rank), "ab" if rank else "abc")
        (loss * float("nan") if total and not weights[rank] else loss).backward()
        ours(data(1, rank), "abc").backward()
        for other in range(2):
            (oracle(data(0, other), "ab" if other else "abc") * shares[other]).backward()
            (oracle(data(1, other), "abc") / 2).backward()
        require_gradients(ours, oracle, rank, 2, 1e-5)

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


@pytest.mark.parametrize("large", [False, True])
def test_computing_sending_and_summing_have_their_dtypes(large: bool) -> None:
    size = 4 * 2**18 if large else 4

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size))
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor, index: Tensor) -> Any:
            self.seen = [self.weight, x, index]
            return (self.weight * x), index

    def program(rank: int) -> None:
        model = Weighted()
        ours = FullyShardedDataParallel(
            model,
            compute_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            output_dtype=torch.float64,
        )
        ranks.taken()
        output, index = ours(torch.full((size,), 256.0 if rank else 1.0), index=torch.arange(3))
        weight, x, seen_index = model.seen
        assert (weight.dtype, x.dtype, seen_index.dtype) == (
            torch.bfloat16,
            torch.bfloat16,
            torch.int64,
        )
        assert (output.dtype, index.dtype) == (torch.float64, torch.int64)
        output.sum().backward()
        (parameter,) = ours.parameters()
        # bf16 cannot hold 257.
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert torch.equal(local_tensor(parameter.grad), torch.full((size // 2,), 128.5))
        length = size // 2 if large else 4
        # bf16 shards of the parameter are padded as those of its own dtype.
        assert ranks.taken() == [
            f"all-gather {length} bfloat16",
            f"all-gather {length} bfloat16",
            f"reduce-scatter {2 * (length + 4)}",
        ]
        with ours.no_sync():
            ours(torch.ones(size), index=torch.arange(3))[0].sum().backward()
        parameter.grad = None
        ours(torch.full((size,), 256.0), index=torch.arange(3))[0].sum().backward()
        # What was kept is added in the parameter's own dtype.
        assert torch.equal(local_tensor(parameter.grad), torch.full((size // 2,), 257.0))

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


def test_by_default_gradients_are_sent_in_the_dtype_in_which_they_are_computed() -> None:
    def program(rank: int) -> None:
        ours = FullyShardedDataParallel(Blocks(silent, 1), compute_dtype=torch.bfloat16)
        ranks.taken()
        output = ours(data(0, rank))
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        assert ranks.taken()[-1] == "reduce-scatter 16 bfloat16"
        plain = FullyShardedDataParallel(Blocks(silent, 1))
        assert plain(data(0, rank).double()).dtype == torch.float64  # Nothing is cast.

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


@pytest.mark.parametrize("parameters", [torch.float32, torch.float16])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float16, torch.bfloat16])
def test_float16_gradients_are_sent_in_float32_unless_told_otherwise(
    parameters: torch.dtype, reduce_dtype: torch.dtype | None
) -> None:
    def program(rank: int) -> None:
        ours = FullyShardedDataParallel(
            Blocks(silent, 1).to(parameters), compute_dtype=torch.float16, reduce_dtype=reduce_dtype
        )
        ranks.taken()
        ours(data(0, rank)).sum().backward()
        length = 16 if parameters == torch.float32 else 32  # Padded as the parameters are.
        kind = "" if reduce_dtype is None else str(reduce_dtype).replace("torch.", " ")
        assert ranks.taken()[-1] == f"reduce-scatter {length}{kind}"
        assert {parameter.grad.dtype for parameter in ours.parameters()} == {parameters}

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


class Outer(nn.Module):
    """A gain outside of the layers, which a policy may replicate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x) * self.gain).to(x.dtype)) * self.scale


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("rest", ["sharded", "replicated"])
def test_clipping_has_the_norm_of_one_process(rest: Any, norm_type: float) -> None:
    def program(rank: int) -> None:
        oracle = Outer()
        ours = FullyShardedDataParallel(Outer(), wrap=WrapPolicy(classes=(nn.Linear,), rest=rest))
        ours(data(0, rank)).square().sum().backward()
        for other in range(4):
            (oracle(data(0, other)).square().sum() / 4).backward()
        ours.module.first.bias.grad = None
        oracle.first.bias.grad = None
        norm = ours.clip_grad_norm_(0.01, norm_type)
        expected = nn.utils.clip_grad_norm_(oracle.parameters(), 0.01, norm_type)
        assert float(norm) == pytest.approx(float(expected), rel=1e-5)
        for (name, own), full in zip(ours.named_parameters(), oracle.parameters(), strict=True):
            if full.grad is not None:
                is_plain = rest == "replicated" and name in ("gain", "scale")
                assert (type(own.grad) is Tensor) == is_plain
                rows = full.grad if is_plain else own_rows(full.grad, rank, 4)
                torch.testing.assert_close(local_tensor(own.grad), rows)

    with fsdp_ranks(4) as ranks:
        ranks.run(program)


def test_replicated_parameters_keep_their_dtype_and_are_averaged() -> None:
    def program(rank: int) -> None:
        ours, oracle = (
            FullyShardedDataParallel(
                Outer(),
                wrap=WrapPolicy(classes=(nn.Linear,), rest="replicated"),
                compute_dtype=torch.bfloat16,
            ),
            Outer(),
        )
        gain = ours.module.gain
        assert not isinstance(gain, DTensor)
        assert torch.equal(gain, oracle.gain)
        seen = []
        ours.module.first.register_forward_pre_hook(
            lambda *_: seen.append((ours.module.gain.dtype, ours.module.first.weight.dtype))
        )
        ranks.taken()
        ours(data(0, rank)).sum().backward()
        assert [line for line in ranks.taken() if "all-reduce" in line] == ["all-reduce 12"]
        assert seen == [(torch.float32, torch.bfloat16)]
        for other in range(2):
            (oracle(data(0, other)).sum() / 2).backward()
        torch.testing.assert_close(gain.grad, oracle.gain.grad, atol=0.05, rtol=0.05)

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


def test_parameters_may_be_frozen_and_unfrozen_on_all_ranks() -> None:
    def program(rank: int) -> None:
        ours, oracle = FullyShardedDataParallel(Blocks(silent, 3)), Blocks(silent, 3)
        for step in range(4):
            for model in (ours.module, oracle):
                model.blocks[1].weight.requires_grad_(step in (0, 2, 3))
            ranks.taken()
            ours(data(step, rank)).sum().backward()
            log = ranks.taken()
            # Agreement goes through the store, not through messages.
            assert not [line for line in log if "all-reduce" in line]
            assert len([line for line in log if "reduce-scatter" in line]) == (
                2 if step == 1 else 3
            )
            for other in range(2):
                (oracle(data(step, other)).sum() / 2).backward()
            require_gradients(ours, oracle, rank, 2)
            for model in (ours, oracle):
                model.zero_grad()

    with fsdp_ranks(2) as ranks:
        for seed in range(2):
            ranks.run(program, seed)


def test_a_model_without_trained_parameters_sends_nothing() -> None:
    def program(rank: int) -> None:
        ours = FullyShardedDataParallel(Blocks(silent, 2).requires_grad_(False))
        ranks.taken()
        x = data(0, rank).requires_grad_()
        ours(x).sum().backward()
        assert x.grad is not None
        assert not [line for line in ranks.taken() if "reduce" in line]
        assert all(parameter.grad is None for parameter in ours.parameters())

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


class _Streams:
    """Streams of the simulated device, with the accelerator's functions for their order."""

    def __init__(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.followed: list[Any] = []
        device = ranks.device
        monkeypatch.setattr(
            accelerator, "point_in_stream", lambda _device: Event(device.current_stream())
        )
        monkeypatch.setattr(
            accelerator, "wait_in_stream", lambda _device, point: device.wait_event(point)
        )
        monkeypatch.setattr(
            accelerator, "follow", lambda _device, stream: self.followed.append(stream)
        )


def test_a_stream_waits_for_parameters_that_another_has_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Large(nn.Module):
        """Used where it arrives, so that its values come with the message, without a copy."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2**18, bias=False)
            nn.init.ones_(self.layer.weight)

        def forward(self, x: Tensor) -> Tensor:
            with ranks.device.stream(Stream(computes=False)):
                self.layer(x)
            return self.layer(x)

    def program(rank: int) -> None:
        ours = FullyShardedDataParallel(Large(), reshard_after_forward=False)
        for _ in range(2):
            output = ours(torch.full((1, 1), rank + 1.0))
            assert torch.equal(output, torch.full((1, 2**18), rank + 1.0))

    with fsdp_ranks(2) as ranks:
        _Streams(ranks, monkeypatch)
        for seed in range(4):
            ranks.run(program, seed)


def test_a_message_follows_the_stream_that_wrote_into_it_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = Stream(computes=False)

    def program(_rank: int) -> None:
        ours = FullyShardedDataParallel(Chosen())
        own = ranks.device.current_stream()
        context = ranks.device.stream(beside)

        def begin(_gradient: Tensor) -> None:
            context.__enter__()

        def end(_gradient: Tensor) -> None:
            context.__exit__(None, None, None)

        # As autograd does, which hands over gradients in the stream of their forward.
        for begins, ends, followed in (
            (False, False, []),
            (True, True, [own, beside]),
            (False, False, []),
            (True, False, [own]),
            (False, False, [beside]),
        ):
            streams.followed.clear()
            x = torch.ones(2, requires_grad=True)
            loss = ours(x, "abc")
            if begins:
                loss.register_hook(begin)
            if ends:  # The gradient of the input is the last.
                x.register_hook(end)
            loss.backward()
            assert streams.followed == followed
            if begins and not ends:
                end(x)
            context = ranks.device.stream(beside)

    with fsdp_ranks(1) as ranks:
        streams = _Streams(ranks, monkeypatch)
        ranks.run(program)


def test_a_gradient_that_is_complete_several_times_is_added_up() -> None:
    class Repeated(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block, self.head = nn.Linear(size, size), nn.Linear(size, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for _ in range(3):
                x = checkpoint(self.block, x, use_reentrant=True)
            return self.head(x)

    def program(rank: int) -> None:
        for size in (4, 5):  # Ranks have equally many rows, or not.
            ours, oracle = FullyShardedDataParallel(Repeated(size)), Repeated(size)
            with ours.no_sync():
                ours(data(0, rank, size)).sum().backward()
            ours(data(1, rank, size)).sum().backward()
            for other in range(2):
                for step in range(2):
                    (oracle(data(step, other, size)).sum() / 2).backward()
            require_gradients(ours, oracle, rank, 2, 1e-5)

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


def test_messages_are_freed_when_they_have_been_received() -> None:
    def program(rank: int) -> int:
        ours = FullyShardedDataParallel(Blocks(silent, 6))
        for step in range(2):
            sent[rank].clear()
            ours(data(step, rank)).sum().backward()
            assert not any(region.tensor() is not None for region in sent[rank])
            ours.zero_grad()
        return most[rank]

    with fsdp_ranks(2) as ranks:
        launch = ranks.device.launch
        sent: list[list[Region]] = [[], []]
        most = [0, 0]

        def launching(group: str, of: Any, kind: str, **keywords: Any) -> Any:
            rank = ranks.device.rank
            if kind == "reduce-scatter":
                sent[rank].append(Region(keywords["inputs"][0]))
                alive = sum(region.tensor() is not None for region in sent[rank])
                most[rank] = max(most[rank], alive)
            return launch(group, of, kind, **keywords)

        with mock.patch.object(ranks.device, "launch", launching):
            assert ranks.run(program) == [2, 2]


def test_a_pass_has_no_gradients_of_the_pass_before_it() -> None:
    def program(rank: int) -> None:
        ours, oracle = FullyShardedDataParallel(Chosen()), Chosen()
        first, second = ours(data(0, rank), "abc"), ours(data(1, rank), "a")
        first.backward()
        ours.zero_grad()
        second.backward()
        for other in range(2):
            (oracle(data(1, other), "a") / 2).backward()
        require_gradients(ours, oracle, rank, 2, 1e-5)

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


def test_a_gradient_that_was_refused_does_not_come_back() -> None:
    def program(rank: int) -> None:
        ours, oracle = FullyShardedDataParallel(Chosen()), Chosen()
        with pytest.raises(GradientError, match="create_graph=True cannot be averaged"):
            ours(data(0, rank), "abc").backward(create_graph=True)
        ours(data(1, rank), "abc").backward()
        oracle(data(1, rank), "abc").backward()
        require_gradients(ours, oracle, 0, 1, 1e-5)

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


def test_the_host_reads_gradients_flags_only_where_a_trained_parameter_has_none() -> None:
    def program(rank: int) -> list[int]:
        model = Chosen()
        model.b.requires_grad_(False)
        ours = FullyShardedDataParallel(model)
        numbers = []
        for used in ("abc", "ac", "a"):
            num_reads[rank] = 0
            ours(data(0, rank), used).backward()
            numbers.append(num_reads[rank])
        return numbers

    read = Tensor.tolist
    num_reads = [0, 0]
    with fsdp_ranks(2) as ranks:

        def counted(tensor: Tensor) -> Any:
            num_reads[ranks.device.rank] += 1
            return read(tensor)

        with mock.patch.object(Tensor, "tolist", counted):
            assert ranks.run(program) == [[0, 0, 1]] * 2


def test_gradients_of_replicas_are_summed_while_backward_goes_on() -> None:
    def program(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 1))
        ours = FullyShardedDataParallel(Blocks(silent, 3), process_group=mesh)
        ranks.taken()
        ours(data(0, rank)).sum().backward()
        return [line for line in ranks.taken() if "all-reduce" in line]

    with fsdp_ranks(2) as ranks, ranks.noting_waits():
        sums = [f"all-reduce {8 * (number + 1) + 4}" for number in (2, 1, 0)]
        waits = [f"wait for {line}" for line in reversed(sums)]  # In the order of the layers.
        assert ranks.run(program)[0] == [*sums, *waits]


def test_statistics_have_the_messages_and_all_waits_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = [itertools.count(), itertools.count()]

    def program(rank: int) -> list[Any]:
        ours = FullyShardedDataParallel(Blocks(silent, 2))
        assert ours.synchronization_stats() is None
        ours(data(0, rank)).sum().backward()
        assert ours.synchronization_stats() is None  # Not recorded.
        assert ours.message_bytes() == [2 * 12 * 4, 2 * 8 * 4]
        ours.record_statistics()
        found = []
        for step in range(2):
            ours(data(step, rank)).sum().backward()
            stats = ours.synchronization_stats()
            assert stats is not None
            found.append(stats)
            assert [bucket.num_bytes for bucket in stats.buckets] == ours.message_bytes()
            assert [bucket.num_parameters for bucket in stats.buckets] == [1, 1]
            first, second = stats.buckets
            assert 0 < first.launch_s < second.launch_s < first.finish_s < second.finish_s
            assert second.launch_s - stats.backward_s < second.finish_s
            # Each wait lasts from one reading of the clock to the next: two all-gathers in
            # forward, one in backward, and two reduce-scatters.
            assert stats.exposed_wait_s == 5
            with torch.no_grad():
                ours(data(2, rank))  # Its waits belong to no step.
            assert ours.synchronization_stats() == stats
        assert found[0] == found[1]
        ours.record_statistics(False)
        ours(data(1, rank)).sum().backward()
        assert ours.synchronization_stats() is None
        return found

    with fsdp_ranks(2) as ranks:
        monkeypatch.setattr(
            "paceline.parallel.traffic.now", lambda _device: float(next(moments[ranks.device.rank]))
        )
        first, second = ranks.run(program)
    assert first == second
    # The clock is read twice for messages and four times for waits, and then for the end.
    assert first[0].backward_s == 7


def test_what_is_told_of_the_last_synchronised_pass_stays_until_the_next() -> None:
    def program(rank: int) -> None:
        ours = FullyShardedDataParallel(Chosen())
        ours(data(0, rank), "a").backward()
        told = ours.message_bytes(), ours._arrived()
        assert told == ([2 * 16 * 4], {"a": True, "b": False, "c": False})
        with ours.no_sync():
            ours(data(1, rank), "ab").backward()
        assert (ours.message_bytes(), ours._arrived()) == told
        x = data(2, rank).requires_grad_()
        torch.autograd.grad(ours(x, "ab"), x)
        assert (ours.message_bytes(), ours._arrived()) == told
        ours(data(3, rank), "c").backward()
        # What was kept has been sent too.
        assert ours._arrived() == {"a": True, "b": True, "c": True}

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


def test_statistics_that_are_wanted_after_forward_are_of_its_backward() -> None:
    def program(rank: int) -> None:
        ours = FullyShardedDataParallel(Chosen())
        output = ours(data(0, rank), "abc")
        ours.record_statistics()
        output.backward()
        assert ours.synchronization_stats() is not None

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


def test_a_rank_whose_last_layer_has_no_gradient_sends_it_like_the_others() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Chosen(), Chosen()

        def forward(self, x: Tensor, used: str) -> Tensor:
            return self.last(self.first(x, "a").tanh(), used)

    def program(rank: int) -> None:
        ours, oracle = FullyShardedDataParallel(Optional()), Optional()
        for step in range(2):
            ours(data(step, rank), "" if rank else "ab").backward()
            for other in range(2):
                (oracle(data(step, other), "" if other else "ab") / 2).backward()
        require_gradients(ours, oracle, rank, 2, 1e-5)

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


class _Seeing(nn.Module):
    """Shows the parameters that its forward has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))
        self.turned = nn.Parameter(torch.ones(4, 3).T)
        self.seen: list[tuple[torch.dtype, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [(p.dtype, p.untyped_storage().data_ptr()) for p in (self.weight, self.turned)]
        return (x @ self.weight.T) @ self.turned

    def is_in_place(self) -> bool:
        """Whether they were in the memory of the shards."""
        shards = [local_tensor(p).untyped_storage().data_ptr() for p in self.parameters()]
        return [address for _, address in self.seen] == shards


def test_one_rank_computes_with_its_shards_where_they_are() -> None:
    def program(rank: int) -> None:
        contiguous = _Seeing()
        contiguous.turned = nn.Parameter(torch.ones(3, 4))
        for model, dtype, is_in_place in (
            (contiguous, None, True),
            (copy.deepcopy(contiguous), torch.float32, True),
            (copy.deepcopy(contiguous), torch.bfloat16, False),
            (_Seeing(), None, False),  # Its strides are not those of rows.
        ):
            ours = FullyShardedDataParallel(model, compute_dtype=dtype)
            assert not any(layer.num_present_bytes for layer in ours._layers)
            ours(data(0, rank)).sum().backward()
            assert model.is_in_place() == is_in_place
            assert [dtype for dtype, _ in model.seen] == [dtype or torch.float32] * 2
            assert not any(layer.num_present_bytes for layer in ours._layers)

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


def test_a_layer_has_the_memory_of_its_full_parameters_only_while_it_is_gathered() -> None:
    def program(rank: int) -> list[int]:
        model = Blocks(silent, 2)
        ours = FullyShardedDataParallel(model)
        present = [layer.num_present_bytes for layer in ours._layers]
        for block in model.blocks:
            block.register_forward_pre_hook(
                lambda *_: present.extend(layer.num_present_bytes for layer in ours._layers)
            )
        for step in range(2):
            ours(data(step, rank)).sum().backward()
        return present

    with fsdp_ranks(2) as ranks:
        # Small parameters are copied out of a receive buffer of the same size.
        assert ranks.run(program)[0] == [0, 0, *(32, 0), *(0, 64), *(32, 64), *(0, 64)]


def test_full_states_share_no_memory_with_the_shards() -> None:
    def program(_rank: int) -> None:
        model = Shapes()
        ours = FullyShardedDataParallel(model, compute_dtype=torch.bfloat16)
        oracle = copy.deepcopy(Shapes())
        state = ours.full_state_dict()
        for name, parameter in oracle.named_parameters():
            assert torch.equal(state[name], parameter)
            assert state[name].dtype == parameter.dtype
            if name == "turned":
                assert state[name].stride() == parameter.stride()
            state[name].zero_()
        require_values(ours, oracle, 0)

    for num_ranks in (1, 2):
        with fsdp_ranks(num_ranks) as ranks:
            ranks.run(program)
