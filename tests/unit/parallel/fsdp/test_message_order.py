"""When the fully sharded container gathers, frees, sends and waits, on two ranks of one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.parallel import FullyShardedDataParallel
from tests.unit.parallel.fsdp.ranks import (
    Block,
    Blocks,
    Ranks,
    data,
    fsdp_ranks,
    gather,
    require_gradients,
    send,
    silent,
)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with fsdp_ranks(2) as made:
        yield made


def _waits(launches: list[str]) -> list[str]:
    return [f"wait for {launch}" for launch in launches]


def _only(kind: str, log: list[str]) -> list[str]:
    return [line for line in log if line.startswith(kind)]


def _make(ranks: Ranks, num_blocks: int = 5, **options: Any) -> tuple[Any, Blocks]:
    """Returns a container and its model; nothing of its making stays in the log."""
    model = Blocks(ranks.note, num_blocks)
    ours = FullyShardedDataParallel(model, **options)
    ranks.taken()
    return ours, model


def _oracle(steps: list[tuple[int, tuple[int, ...] | None]], num_blocks: int = 5) -> Blocks:
    """Returns one process's model with the mean gradients of both ranks."""
    model = Blocks(silent, num_blocks)
    for step, order in steps:
        for rank in range(2):
            (model(data(step, rank), order).sum() / 2).backward()
    return model


def test_a_known_pass_gathers_ahead_sends_once_and_waits_late(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks)
        for step in range(3):
            ranks.taken()
            output = ours(data(step, rank))
            forward = ranks.taken()
            output.sum().backward()
            backward = ranks.taken()
            if step:
                assert forward == [
                    *(*gather(0, 1, 2), *_waits(gather(0)), "forward 0"),
                    *(*gather(3), *_waits(gather(1)), "forward 1"),
                    *(*gather(4), *_waits(gather(2)), "forward 2"),
                    *(*_waits(gather(3)), "forward 3"),
                    *(*_waits(gather(4)), "forward 4"),
                ]
                begin = [*gather(3, 2), "backward 4"]
            else:  # The order is unknown.
                assert forward == [
                    line
                    for number in range(5)
                    for line in (*gather(number), *_waits(gather(number)), f"forward {number}")
                ]
                begin = [*gather(4, 3, 2), *_waits(gather(4)), "backward 4"]
            assert backward == [
                *begin,
                *(*send(4), *gather(1), *_waits(gather(3)), "backward 3"),
                *(*send(3), *_waits(send(4)), *gather(0), *_waits(gather(2)), "backward 2"),
                *(*send(2), *_waits(send(3)), *_waits(gather(1)), "backward 1"),
                *(*send(1), *_waits(send(2)), *_waits(gather(0)), "backward 0"),
                *(*send(0), *_waits(send(1)), *_waits(send(0))),
            ]
            assert not model.present()
        require_gradients(ours, _oracle([(step, None) for step in range(3)]), rank, 2)

    with ranks.noting_waits():
        for seed in range(4):
            ranks.run(program, seed)


def test_a_layer_has_memory_from_its_forward_to_its_end_and_in_backward(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks)
        for block in model.blocks:
            block.note = lambda text: ranks.note(f"{text}: {model.present()}")
        for step in range(2):
            output = ours(data(step, rank))
            # Only of the last layer, which backward needs first.
            assert model.present() == ([4] if step else [])
            output.sum().backward()
            assert not model.present()
            log = [line for line in ranks.taken() if "ward" in line]
            assert log[5:] == [f"backward {number}: [{number}]" for number in (4, 3, 2, 1, 0)]
        # `seen` has the parameter before the forward that is noted, from the second step on.
        assert log[:5] == [f"forward {number}: [{number}]" for number in range(5)]

    ranks.run(program)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_so_many_layers_are_gathered_ahead_as_chosen(ranks: Ranks, prefetch: int) -> None:
    def program(rank: int) -> None:
        ours, _ = _make(ranks, prefetch=prefetch)
        ours(data(0, rank)).sum().backward()
        ranks.taken()
        output = ours(data(1, rank))
        forward = [line for line in ranks.taken() if "wait" not in line]
        expected = list(gather(*range(prefetch)))
        for number in range(5):
            expected += gather(*range(number + prefetch, min(5, number + prefetch + 1)))
            expected.append(f"forward {number}")
        assert forward == expected
        output.sum().backward()
        backward = ranks.taken()
        expected = list(gather(*range(3, 3 - prefetch, -1)))
        for number in range(4, -1, -1):
            expected.append(f"backward {number}")
            expected += send(number)
            ahead = number - 1 - prefetch
            if ahead >= 0:
                expected += gather(ahead)
        assert backward == expected

    ranks.run(program)


def test_parameters_that_stay_are_gathered_once_per_step(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks, reshard_after_forward=False)
        for step in range(2):
            output = ours(data(step, rank))
            assert _only("all-gather", ranks.taken()) == gather(*range(5))
            assert model.present() == [0, 1, 2, 3, 4]
            output.sum().backward()
            assert _only("all-gather", ranks.taken()) == []
            assert not model.present()
        require_gradients(ours, _oracle([(0, None), (1, None)]), rank, 2)
        # What no backward needs is freed.
        ours.eval()
        ours(data(2, rank))
        assert not model.present()

    ranks.run(program)


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference"])
@pytest.mark.parametrize("reshards", [False, True])
def test_evaluation_gathers_ahead_and_leaves_nothing(
    ranks: Ranks, how: str, reshards: bool
) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks, reshard_after_forward=reshards)
        if how == "eval":
            ours.eval()
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        with context.get(how, torch.enable_grad)():
            for step in range(2):
                ranks.taken()
                ours(data(step, rank))
                assert not model.present()
        assert _only("all-gather", ranks.taken()[:3]) == gather(0, 1, 2)
        ours.train()
        # A pass without gradients leaves no trace in the one that follows.
        ours(data(2, rank)).sum().backward()
        log = ranks.taken()
        assert _only("reduce", log) == send(4, 3, 2, 1, 0)
        assert log[:4] == [*gather(0, 1, 2), "forward 0"]
        require_gradients(ours, _oracle([(2, None)]), rank, 2)

    ranks.run(program)


def test_a_pass_in_another_order_gathers_ahead_up_to_the_first_difference(ranks: Ranks) -> None:
    orders = [
        *((0, 1, 2, 3, 4), (0, 1, 4, 3, 2), (0, 1, 4, 3, 2), (0, 1)),
        *((0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 4, 1)),
    ]
    gathers = [
        [*gather(0), "f0", *gather(1), "f1", *gather(2), "f2", *gather(3), "f3", *gather(4), "f4"],
        # The two that were gathered ahead before block 4 came are not gathered again.
        [*gather(0, 1, 2), "f0", *gather(3), "f1", *gather(4), "f4", "f3", "f2"],
        [*gather(0, 1, 4), "f0", *gather(3), "f1", *gather(2), "f4", "f3", "f2"],
        [*gather(0, 1, 4), "f0", *gather(3), "f1"],
        [*gather(0, 1), "f0", "f1", *gather(2), "f2", *gather(3), "f3"],
        [*gather(0, 1, 2), "f0", *gather(3), "f1", "f2", "f3", *gather(4), "f4"],
        [*gather(0, 1, 2), "f0", *gather(4), "f4", "f1"],
    ]

    def program(rank: int) -> None:
        ours, _ = _make(ranks)
        for step, order in enumerate(orders):
            ranks.taken()
            output = ours(data(step, rank), order)
            log = [line.replace("forward ", "f") for line in ranks.taken()]
            assert log == gathers[step]
            output.sum().backward()
            # What has not run has no gradient, and is not sent.
            assert _only("reduce", ranks.taken()) == send(*order[::-1])
            assert not any(layer.num_present_bytes for layer in ours._layers)
        require_gradients(ours, _oracle(list(enumerate(orders))), rank, 2)

    for seed in range(3):
        ranks.run(program, seed)


def test_a_layer_that_runs_twice_is_sent_once_when_backward_has_passed_both(ranks: Ranks) -> None:
    order = (0, 1, 0, 2, 1)

    def program(rank: int) -> None:
        ours, model = _make(ranks, 3)
        for step in range(2):
            ranks.taken()
            output = ours(data(step, rank), order)
            assert model.present() == ([1] if step else [])
            output.sum().backward()
            log = [line for line in ranks.taken() if "backward" in line or "reduce" in line]
            assert log == [
                *("backward 1", "backward 2", *send(2), "backward 0", "backward 1"),
                *(*send(1), "backward 0", *send(0)),
            ]
            assert not model.present()
        require_gradients(ours, _oracle([(0, order), (1, order)], 3), rank, 2)

    for seed in range(3):
        ranks.run(program, seed)


def test_passes_without_synchronisation_send_nothing_until_the_next_one(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks)
        with ours.no_sync():
            ours(data(0, rank)).sum().backward()
            output = ours(data(1, rank))
        assert ours.message_bytes() == []
        output.sum().backward()  # Its forward ran inside the context.
        output = ours(data(2, rank))
        with ours.no_sync():
            output.sum().backward()
        assert not _only("reduce", ranks.taken())
        assert all(parameter.grad is None for parameter in ours.parameters())
        assert not model.present()
        ours(data(3, rank)).sum().backward()
        assert _only("reduce", ranks.taken()) == send(4, 3, 2, 1, 0)
        require_gradients(ours, _oracle([(step, None) for step in range(4)]), rank, 2)

    for seed in range(3):
        ranks.run(program, seed)


def test_gradients_that_were_kept_go_with_a_pass_that_has_others(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        ours, _ = _make(ranks, 3)
        with ours.no_sync():
            ours(data(0, rank), (0, 1)).sum().backward()
        ours(data(1, rank), (1, 2)).sum().backward()
        log = _only("reduce", ranks.taken())
        assert log == send(2, 1)  # Block 0 has not run in this pass.
        oracle = _oracle([(1, (1, 2))], 3)
        for other in range(2):
            (oracle(data(0, other), (0, 1)).sum() / 2).backward()
        oracle.blocks[0].weight.grad = None
        require_gradients(ours, oracle, rank, 2)

    ranks.run(program)


@pytest.mark.parametrize("way", ["in turn", "together", "reversed"])
def test_several_forward_passes_before_backward_each_send_their_gradients(
    ranks: Ranks, way: str
) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks, 3)
        losses = [ours(data(step, rank)).sum() for step in range(2)]
        ranks.taken()
        if way == "together":
            sum(losses).backward()  # type: ignore[union-attr]
        else:
            for loss in losses if way == "in turn" else losses[::-1]:
                loss.backward()
        assert _only("reduce", ranks.taken()) == send(2, 1, 0, 2, 1, 0)
        assert not model.present()
        require_gradients(ours, _oracle([(0, None), (1, None)], 3), rank, 2)

    for seed in range(3):
        ranks.run(program, seed)


def test_a_pass_whose_loss_is_not_used_leaves_nothing_for_the_next(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks)
        ours(data(0, rank)).sum().backward()
        ours(data(1, rank))
        assert model.present() == [4]
        ranks.taken()
        output = ours(data(2, rank))
        log = ranks.taken()
        assert log[:4] == [*gather(0, 1, 2), "forward 0"]
        assert _only("all-gather", log) == gather(0, 1, 2, 3, 4)
        output.sum().backward()
        require_gradients(ours, _oracle([(0, None), (2, None)]), rank, 2)

    ranks.run(program)


def test_a_frozen_layer_below_all_trained_ones_is_not_gathered_in_backward(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        model, oracle = Blocks(silent, 3), Blocks(silent, 3)
        for one in (model, oracle):
            one.blocks[0].requires_grad_(False)
        ours = FullyShardedDataParallel(model)
        for step in range(2):
            output = ours(data(step, rank))
            ranks.taken()
            output.sum().backward()
            assert ranks.taken() == [*gather(*((1,) if step else (2, 1))), *send(2, 1)]
            for other in range(2):
                (oracle(data(step, other)).sum() / 2).backward()
        require_gradients(ours, oracle, rank, 2)

    ranks.run(program)


def test_what_was_gathered_ahead_for_nothing_is_waited_for_before_it_is_freed(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        ours, _ = _make(ranks)
        with torch.no_grad():
            ours(data(0, rank))
            ranks.taken()
            ours(data(1, rank), (0, 1))
            assert not _only("wait", ranks.taken())[2:]
            ours(data(2, rank), (0, 1))
        assert ranks.taken()[:2] == _waits(gather(2, 3))

    with ranks.noting_waits():
        for seed in range(4):
            ranks.run(program, seed)


def test_gradients_of_the_input_alone_send_nothing_and_leave_nothing(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks, 3)
        ours.set_gradient_weight(rank + 1.0)
        x = data(0, rank).requires_grad_()
        (gradient,) = torch.autograd.grad(ours(x).sum(), x)
        oracle = Blocks(silent, 3)
        y = data(0, rank).requires_grad_()
        torch.testing.assert_close(gradient, *torch.autograd.grad(oracle(y).sum(), y))
        assert not _only("reduce", ranks.taken())
        assert ours.message_bytes() == []
        assert all(parameter.grad is None for parameter in ours.parameters())
        assert not model.present()
        # The weight is that of the pass that follows.
        ours(data(1, rank)).sum().backward()
        for other in range(2):
            (oracle(data(1, other)).sum() * (other + 1) / 3).backward()
        require_gradients(ours, oracle, rank, 2)

    ranks.run(program)


def test_gradients_of_full_parameters_are_returned_and_not_sent(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks, 2)
        oracle = Blocks(silent, 2)
        loss = ours(data(0, rank)).sum()
        ((full,),) = (block.seen for block in model.blocks[:1])
        (gradient,) = torch.autograd.grad(loss, full)
        weight = oracle.blocks[0].weight
        (expected,) = torch.autograd.grad(oracle(data(0, rank)).sum(), weight)
        torch.testing.assert_close(gradient, expected)
        assert not _only("reduce", ranks.taken())
        assert all(parameter.grad is None for parameter in ours.parameters())
        assert not model.present()

    ranks.run(program)


def test_backward_of_part_of_the_layers_sends_the_same_on_all_ranks(ranks: Ranks) -> None:
    class Detached(Blocks):
        def forward(self, x: Tensor, order: Any = None) -> Tensor:
            for number, block in enumerate(self.blocks):
                x = block(x)
                if number == 1 and order == 1:
                    x = x.detach()
            return x

    def program(rank: int) -> list[str]:
        model = Detached(silent, 4)
        ours = FullyShardedDataParallel(model)
        for step in range(2):
            ranks.taken()
            ours(data(step, rank), rank).sum().backward()
        log = ranks.taken()
        assert not model.present()
        oracle = Detached(silent, 4)
        for step in range(2):
            for other in range(2):
                (oracle(data(step, other), other).sum() / 2).backward()
        require_gradients(ours, oracle, rank, 2)
        assert ours._arrived() == {
            f"blocks.{number}.weight": rank == 0 or number > 1 for number in range(4)
        }
        return log

    first, second = ranks.run(program)
    assert first == second
    assert _only("reduce", first) == send(3, 2, 1, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_are_gathered_again_and_sent(ranks: Ranks, reentrant: bool) -> None:
    class Checkpointed(Blocks):
        def forward(self, x: Tensor, order: Any = None) -> Tensor:
            x = x.clone().requires_grad_()
            for block in self.blocks[:3]:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.blocks[3](x)

    def program(rank: int) -> None:
        model = Checkpointed(ranks.note, 4)
        ours = FullyShardedDataParallel(model)
        for step in range(2):
            ranks.taken()
            output = ours(data(step, rank))
            ranks.taken()
            output.sum().backward()
            log = ranks.taken()
            # Each layer runs again in backward, just before it is needed.
            assert _only("forward", log) == ["forward 2", "forward 1", "forward 0"]
            assert sorted(_only("all-gather", log)) == sorted(
                gather(*((2, 1, 0) if step else (3, 2, 1, 0)))
            )
            assert _only("reduce", log) == send(3, 2, 1, 0)
            if reentrant:
                assert log.index(*send(2)) > log.index("backward 0")
            else:
                assert log.index(*send(2)) < log.index("backward 1")
            assert not model.present()
        oracle = Checkpointed(silent, 4)
        for step in range(2):
            for other in range(2):
                (oracle(data(step, other)).sum() / 2).backward()
        require_gradients(ours, oracle, rank, 2)

    for seed in range(3):
        ranks.run(program, seed)


def test_a_pass_that_ends_in_a_recomputed_layer_is_synchronised_as_its_forward_was(
    ranks: Ranks,
) -> None:
    class Recomputed(Blocks):
        def forward(self, x: Tensor, order: Any = None) -> Tensor:
            x = x.clone().requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    def program(rank: int) -> None:
        ours, oracle = FullyShardedDataParallel(Recomputed(silent, 2)), Recomputed(silent, 2)
        with ours.no_sync():
            output = ours(data(0, rank))
        output.sum().backward()
        assert not _only("reduce", ranks.taken())
        ours(data(1, rank)).sum().backward()
        assert _only("reduce", ranks.taken()) == send(0, 1)
        for step in range(2):
            for other in range(2):
                (oracle(data(step, other)).sum() / 2).backward()
        require_gradients(ours, oracle, rank, 2)

    ranks.run(program)


class _Twice(nn.Module):
    """A block inside of a reentrant checkpoint and outside, so that its gradient comes twice."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, note) for number in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x.clone().requires_grad_(), use_reentrant=True)
        return self.blocks[0](self.blocks[1](x))


def test_a_gradient_that_comes_again_after_its_message_is_sent_with_a_second(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        ours = FullyShardedDataParallel(_Twice(ranks.note))
        oracle = _Twice(silent)
        for step in range(2):
            ranks.taken()
            ours(data(step, rank)).sum().backward()
            assert _only("reduce", ranks.taken()) == send(0, 1, 0)
            for other in range(2):
                (oracle(data(step, other)).sum() / 2).backward()
        require_gradients(ours, oracle, rank, 2)

    ranks.run(program)


def _penalty(model: nn.Module, x: Tensor, way: str) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x).sum(-1)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    penalty = ((gradient.norm(dim=-1) - 1) ** 2).mean()
    return penalty if way == "alone" else penalty + y.mean()


@pytest.mark.parametrize("way", ["alone", "with the loss", "before another pass"])
def test_a_gradient_penalty_sends_all_at_its_end_and_frees_all(ranks: Ranks, way: str) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks, 3)
        oracle = Blocks(silent, 3)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, oracle)]
        for step in range(2):
            loss = _penalty(ours, data(step, rank), way)
            assert not _only("reduce", ranks.taken())
            # The graph needs them in the backward pass that follows.
            assert model.present() == [0, 1, 2]
            if way == "before another pass":
                loss = loss + ours(data(step + 9, rank)).mean()
            ranks.taken()
            loss.backward()
            # The gradients of the penalty may come in any order, so all are sent at the end too.
            passes = 2 if way == "before another pass" else 1
            assert _only("reduce", ranks.taken()) == send(2, 1, 0) * passes + send(0, 1, 2)
            assert not model.present()
            for other in range(2):
                loss = _penalty(oracle, data(step, other), way)
                if way == "before another pass":
                    loss = loss + oracle(data(step + 9, other)).mean()
                (loss / 2).backward()
            require_gradients(ours, oracle, rank, 2, 1e-5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    ranks.run(program)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_graph_that_is_kept_does_not_keep_values_from_before_a_step(
    ranks: Ranks, foreach: bool
) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks, 2)
        oracle = Blocks(silent, 2)
        optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.5, foreach=foreach) for m in (ours, oracle)
        ]
        ours(data(0, rank)).sum().backward()
        for other in range(2):
            (oracle(data(0, other)).sum() / 2).backward()
        _penalty(ours, data(1, rank), "alone")  # Its loss is only looked at.
        assert model.present() == [0, 1]
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(ours(data(2, rank)), oracle(data(2, rank)))

    ranks.run(program)


def test_a_graph_that_is_kept_needs_no_layer_to_run_again(ranks: Ranks) -> None:
    def program(rank: int) -> None:
        ours, model = _make(ranks, 3)
        oracle = Blocks(silent, 3)
        loss = _penalty(ours, data(0, rank), "alone")
        ours(data(1, rank), (1,))
        assert model.present() == [0, 1, 2]
        loss.backward()
        assert not model.present()
        for other in range(2):
            (_penalty(oracle, data(0, other), "alone") / 2).backward()
        require_gradients(ours, oracle, rank, 2, 1e-5)

    for seed in range(3):
        ranks.run(program, seed)
