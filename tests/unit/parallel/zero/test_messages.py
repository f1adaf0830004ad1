"""Which messages a pass and a step send, when, and what is left of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.parallel.zero import bucket as bucket_module
from paceline.parallel.zero.bucket import ReducedGradient
from tests.unit.parallel.zero.ranks import ONE_EACH, SHAPES, Parts, Twins, on_ranks, zero_ranks

pytestmark = pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")

ALL = tuple(range(len(SHAPES)))


@pytest.mark.parametrize("shapes", [SHAPES, ((1,), (5,))])
def test_the_padding_stays_zero(shapes: tuple[tuple[int, ...], ...]) -> None:
    """The optimizer updates the padding between tensors with them, and its state is saved."""

    def program(rank: int) -> None:
        twins = Twins(rank, 2, lambda: Parts(shapes), bucket_size_mb=None)
        for number in range(2):
            twins.backward(number)
            for flat in twins.flats:
                assert bool(flat.gradient.isfinite().all())
            twins.step()
            twins.ours.wait_for_parameters()
        (flat,) = twins.flats
        is_padding = torch.ones(flat.buffer.numel(), dtype=torch.bool)
        for slot in flat.layout.slots:
            is_padding[slot.offset : slot.offset + slot.num_elements] = False
        assert is_padding.sum() >= 5
        assert not flat.buffer[is_padding].any()
        for tensor in twins.sharded.state_tensors():
            assert bool(tensor.isfinite().all())
            assert not tensor[is_padding.chunk(2)[rank][: tensor.numel()]].any()

    on_ranks(2, program)


def test_buckets_are_sent_in_backward_order_and_their_counts_last() -> None:
    with zero_ranks(2) as ranks:

        def program(rank: int) -> None:
            twins = Twins(rank, 2, bucket_size_mb=ONE_EACH)
            ranks.events[rank].clear()
            twins.backward(0)
            backward = list(ranks.events[rank])
            # One message is in flight while the next is filled; nothing waits for the counts.
            assert [event for event in backward if event.startswith("send")] == [
                "send reduce-scatter 16 float32",
                "send reduce-scatter 8 float32",
                "send reduce-scatter 8 float32",
                "send reduce-scatter 16 float32",
                "send reduce-scatter 8 float32",
                "send all-reduce 5 float32",
            ]
            assert [event for event in backward if event.startswith("wait")] == [
                "wait reduce-scatter"
            ] * 5
            ranks.events[rank].clear()
            twins.sharded.step()
            after = list(ranks.events[rank])
            assert after[0] == "wait all-reduce"
            assert after[1:] == [
                "send all-gather 4 float32",
                "send all-gather 8 float32",
                "send all-gather 4 float32",
                "send all-gather 4 float32",
                "send all-gather 8 float32",
            ]
            twins.ours.wait_for_parameters()

        ranks.run(program)


def test_the_host_reads_the_counts_once_and_only_for_what_it_misses() -> None:
    with pytest.MonkeyPatch.context() as patch:
        reads: list[int] = []
        to_list = torch.Tensor.tolist

        def program(rank: int) -> None:
            twins = Twins(rank, 2)
            patch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(rank), to_list(t))[1])
            # The last pass of rank 1 has what the first had not.
            for number, missing in enumerate(((0, 1), (0, 1, 2), ALL)):
                twins.backward(number, ALL, missing, only_here=True)
            twins.sharded.step()
            twins.sharded.zero_grad()
            assert not reads
            for number in range(2):
                twins.backward(number, ALL, (0, 2), only_here=True)
            twins.ours.clip_grad_norm_(1.0)
            twins.sharded.step()
            twins.ours.wait_for_parameters()

        on_ranks(2, program)
    assert reads == [1]


def test_a_message_is_freed_when_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    with zero_ranks(2) as ranks:
        messages: list[list[StorageWeakRef]] = [[], []]
        start = bucket_module.start_reduce_scatter

        def noted(message: torch.Tensor, group: Any) -> Any:
            messages[dist.get_rank()].append(StorageWeakRef(message.untyped_storage()))
            return start(message, group)

        monkeypatch.setattr(bucket_module, "start_reduce_scatter", noted)

        def program(rank: int) -> None:
            twins = Twins(rank, 2)
            for number in range(2):
                twins.backward(number)
                own = [message.expired() for message in messages[rank]]
                assert own == [True] * 3 * (number + 1)
            twins.step()
            twins.ours.wait_for_parameters()

        ranks.run(program)


def test_after_a_pass_a_parameter_has_a_reduced_gradient() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        twins.backward(0)
        for name, parameter in twins.ours.module.named_parameters():
            gradient = parameter.grad
            assert type(gradient) is ReducedGradient
            assert gradient.parameter_name == name
            assert (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)
            assert gradient.untyped_storage().nbytes() == 0
        twins.ours.zero_grad()
        assert all(parameter.grad is None for parameter in twins.ours.parameters())

    on_ranks(2, program)


def test_shards_of_frozen_buckets_move_on_while_they_have_gradients() -> None:
    """As torch's optimizers, which look at gradients and not at what is frozen."""
    with zero_ranks(2) as ranks:

        def program(rank: int) -> None:
            twins = Twins(rank, 2, bucket_size_mb=ONE_EACH)
            frozen = 1, 2
            twins.backward(0)
            twins.step(clear=False)
            for model in (twins.ours.module, twins.alone):
                for index in frozen:
                    model.parts[index].value.requires_grad_(False)
            twins.step(clear=False)
            twins.require_equal()
            for optimizer in (twins.sharded, twins.whole):
                optimizer.zero_grad()
            ranks.events[rank].clear()
            twins.backward(1, (0, 3, 4), (0, 3, 4))
            twins.step()
            # Nothing updates the frozen ones, and nobody sends them.
            sent = [event for event in ranks.events[rank] if "all-gather" in event]
            assert [event for event in sent if event.startswith("send")] == [
                "send all-gather 4 float32",
                "send all-gather 4 float32",
                "send all-gather 8 float32",
            ]
            twins.require_equal()

        ranks.run(program)


def test_what_was_frozen_before_its_first_gradient_is_not_sent() -> None:
    with zero_ranks(2) as ranks:

        def program(rank: int) -> None:
            twins = Twins(rank, 2, bucket_size_mb=ONE_EACH)
            for model in (twins.ours.module, twins.alone):
                model.parts[1].value.requires_grad_(False)
            twins.backward(0, (0, 2, 3, 4), (0, 2, 3, 4))
            ranks.events[rank].clear()
            twins.step()
            sent = [event for event in ranks.events[rank] if event.startswith("send")]
            assert len(sent) == 4
            twins.require_equal()

        ranks.run(program)
