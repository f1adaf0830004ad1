"""What the fully sharded container does after a pass that an error ended."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from paceline.devices import accelerator
from paceline.parallel import FullyShardedDataParallel
from paceline.parallel.reducer import SynchronizationError
from tests.unit.parallel.fsdp.ranks import Blocks, data, fsdp_ranks, require_gradients, silent


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Tensor:
        raise ZeroDivisionError


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def _run_out(*_: Any) -> None:
    raise MemoryError


def _fail_in_backward(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
    return _Breaks.apply(output)


def _break(ours: nn.Module, where: str, rank: int) -> None:
    """Breaks a pass in the second of three blocks."""
    block = ours.module.blocks[1]
    handle = {
        "forward": lambda: block.register_forward_hook(_fail),
        "before": lambda: block.register_forward_pre_hook(_fail),
        "backward": lambda: block.register_forward_hook(_fail_in_backward),
    }[where]()
    with pytest.raises(ZeroDivisionError):
        ours(data(0, rank)).sum().backward()
    handle.remove()


@pytest.mark.parametrize("where", ["before", "forward", "backward"])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_one_rank_alone_goes_on(where: str, with_gradients: bool) -> None:
    def program(rank: int) -> None:
        model = Blocks(silent, 3)
        ours, oracle = FullyShardedDataParallel(model), Blocks(silent, 3)
        if with_gradients:
            ours(data(4, rank)).sum().backward()
            oracle(data(4, rank)).sum().backward()
        for _ in range(2):
            _break(ours, where, rank)
            if where != "backward":
                assert all(
                    any(parameter is own for own in ours.parameters())
                    for parameter in model.parameters()
                )
        for step in (1, 2):
            ours(data(step, rank)).sum().backward()
            oracle(data(step, rank)).sum().backward()
        require_gradients(ours, oracle, 0, 1)

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_one_rank_alone_goes_on_after_it_was_interrupted(reentrant: bool | None) -> None:
    """An interrupt calls no hooks; with a checkpoint, it comes while a layer is recomputed."""

    class Checkpointed(Blocks):
        def forward(self, x: Tensor, order: Any = None) -> Tensor:
            x = x.clone().requires_grad_()
            for block in self.blocks:
                x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
            return x

    def program(rank: int) -> None:
        ours, oracle = FullyShardedDataParallel(Checkpointed(silent, 3)), Checkpointed(silent, 3)
        for _ in range(2):
            num_calls = 0

            def interrupt(*_: Any) -> None:
                nonlocal num_calls
                num_calls += 1
                if num_calls == (1 if reentrant is None else 2):
                    raise KeyboardInterrupt

            handle = ours.module.blocks[1].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                ours(data(0, rank)).sum().backward()
            handle.remove()
            if reentrant is None:
                assert all(isinstance(shard, DTensor) for shard in ours.parameters())
        for step in (1, 2):
            ours(data(step, rank)).sum().backward()
            oracle(data(step, rank)).sum().backward()
            assert not any(layer.num_present_bytes for layer in ours._layers)
        require_gradients(ours, oracle, 0, 1)

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


def test_one_rank_alone_goes_on_after_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int) -> None:
        ours = FullyShardedDataParallel(Blocks(silent, 3), compute_dtype=torch.bfloat16)
        with monkeypatch.context() as patches:
            # The first layer is gathered, and nobody uses it yet.
            patches.setattr(accelerator, "point_in_stream", _run_out)
            with pytest.raises(MemoryError):
                ours(data(0, rank))
        for _ in range(2):
            ours(data(0, rank)).sum().backward()
            assert not any(layer.num_present_bytes for layer in ours._layers)

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


@pytest.mark.parametrize("where", ["before", "forward", "backward"])
def test_several_ranks_refuse_to_go_on(where: str) -> None:
    def program(rank: int) -> None:
        ours = FullyShardedDataParallel(Blocks(silent, 3))
        _break(ours, where, rank)
        for _ in range(2):
            kind = "backward" if where == "backward" else "forward"
            message = (
                f"rank {rank}: the last {kind} pass was interrupted.*restart from a checkpoint"
            )
            with pytest.raises(SynchronizationError, match=message):
                ours(data(1, rank))

    with fsdp_ranks(2) as ranks:
        # What was on its way stays there.
        ranks.scheduler.run(program, 0)
        ranks.device.clear()


def test_several_ranks_go_on_if_nothing_was_gathered_yet() -> None:
    def program(rank: int) -> None:
        ours, oracle = FullyShardedDataParallel(Blocks(silent, 2)), Blocks(silent, 2)
        handle = ours.module.register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            ours(data(0, rank))
        handle.remove()
        ours(data(1, rank)).sum().backward()
        for other in range(2):
            (oracle(data(1, other)).sum() / 2).backward()
        require_gradients(ours, oracle, rank, 2)

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_gradient_that_comes_too_late_is_an_error(num_ranks: int) -> None:
    class Late(Blocks):
        """The loss also depends on a number that a block computes beside its output."""

        start: Tensor

        def forward(self, x: Tensor, order: Any = None) -> Tensor:
            x = self.blocks[0](x)
            block = self.blocks[1]
            aside: list[Callable[[], Tensor]] = []
            handle = block.register_forward_pre_hook(lambda *_: aside.append(block.weight.sum()))
            y = block(x)
            handle.remove()
            (number,) = aside
            self.start.register_hook(lambda _gradient: torch.autograd.backward(number))
            return y

    def program(rank: int) -> None:
        model = Late(silent, 2)
        ours = FullyShardedDataParallel(model)
        model.start = data(0, rank).requires_grad_()
        output = ours(model.start * 2.0)
        message = r"'blocks\.1\.weight' got a gradient after its layer's gradients were sent"
        with pytest.raises(SynchronizationError, match=message):
            output.sum().backward()

    with fsdp_ranks(num_ranks) as ranks:
        ranks.scheduler.run(program, 0)
        ranks.device.clear()
