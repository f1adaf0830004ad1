"""Features of each strategy, with a check for each; the docs' table is generated from them.

A cell is "yes" where the check passes, "refused" where the strategy raises a usage error, and empty
where nothing is checked. `test_strategy_features` runs every non-empty cell;
`scripts/reference.py` writes the table.
"""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from paceline.core.strategies import StrategyName
from paceline.parallel.strategies import (
    apply_strategy,
    make_optimizer,
    message_sizes,
    record_statistics,
    synchronization_stats,
)

Cell = Literal["yes", "refused"]
_WIDTH = 8
_RATE = 0.1

_REPLICATED: tuple[StrategyName, ...] = ("naive", "flat", "overlapped", "ddp")
_WITH_WHOLE_GRADIENTS: tuple[StrategyName, ...] = (*_REPLICATED, "zero1")
OURS: tuple[StrategyName, ...] = (*_WITH_WHOLE_GRADIENTS, *("zero2", "fsdp"))
_TORCHS: tuple[StrategyName, ...] = ("torch_ddp", "torch_zero", "torch_fsdp2")
STRATEGIES: tuple[StrategyName, ...] = (*OURS, *_TORCHS)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for number, block in enumerate(self.blocks):
            # All layers run on all ranks, but the loss need not depend on each of them.
            y = torch.tanh(block(x))
            x = x if number == skipped else x + y
        return x


class Pair:
    """A model under a strategy and its single-process reference."""

    def __init__(self, rank: int, world_size: int, strategy: StrategyName) -> None:
        self.rank, self.world_size = rank, world_size
        torch.manual_seed(0)
        self.inner = Layers()
        self.model = apply_strategy(strategy, self.inner)
        self.optimizer = make_optimizer(strategy, self.model, torch.optim.SGD, lr=_RATE)
        torch.manual_seed(0)
        self.alone = Layers()
        self.optimizer_alone = torch.optim.SGD(self.alone.parameters(), lr=_RATE)

    def data(self, step: int, rank: int) -> Tensor:
        return torch.randn(2, _WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))

    def loss(self, step: int, skipped: int | None = None) -> Tensor:
        """Returns this rank's loss."""
        return self.model(self.data(step, self.rank), skipped).square().mean()

    def pass_alone(
        self, step: int, weights: list[float] | None = None, skipped: dict[int, int] | None = None
    ) -> None:
        """Runs the backward pass of the reference on the data of all ranks."""
        weights = weights or [1.0] * self.world_size
        losses = (
            self.alone(self.data(step, rank), (skipped or {}).get(rank)).square().mean() * weight
            for rank, weight in enumerate(weights)
        )
        (sum(losses) / sum(weights)).backward()

    def step(self) -> None:
        """Steps both optimizers and clears gradients."""
        for optimizer in (self.optimizer, self.optimizer_alone):
            optimizer.step()
            optimizer.zero_grad()

    def require_equal(self) -> None:
        """Compares the parameters of the two models on rank 0."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if self.rank == 0:
            for name, expected in self.alone.state_dict().items():
                torch.testing.assert_close(state[name], expected, atol=1e-5, rtol=1e-5)


def _trains(pair: Pair) -> None:
    for step in range(3):
        pair.loss(step).backward()
        pair.pass_alone(step)
        pair.step()
    pair.require_equal()


def _accumulates(pair: Pair) -> None:
    _trains_once(pair)
    for step in range(1, 3):
        with pair.model.no_sync():
            pair.loss(step).backward()
        pair.pass_alone(step)
    pair.loss(3).backward()
    pair.pass_alone(3)
    pair.step()
    pair.require_equal()


def _trains_once(pair: Pair) -> None:
    pair.loss(0).backward()
    pair.pass_alone(0)
    pair.step()


def _clips(pair: Pair) -> None:
    _clip_with(pair, lambda: pair.model.clip_grad_norm_(0.01))


def _is_clipped_by_torch(pair: Pair) -> None:
    _clip_with(pair, lambda: nn.utils.clip_grad_norm_(pair.model.parameters(), 0.01))


def _clip_with(pair: Pair, clip: Callable[[], Tensor]) -> None:
    pair.loss(0).backward()
    pair.pass_alone(0)
    norm = clip()
    full = getattr(norm, "full_tensor", lambda: norm)()
    expected = nn.utils.clip_grad_norm_(pair.alone.parameters(), 0.01)
    torch.testing.assert_close(full.float(), expected, rtol=1e-5, atol=0)
    pair.step()
    pair.require_equal()


def _weighs(pair: Pair) -> None:
    weights = [float(rank) for rank in range(pair.world_size)]
    pair.model.set_gradient_weight(weights[pair.rank])
    pair.loss(0).backward()
    pair.pass_alone(0, weights)
    pair.step()
    pair.require_equal()


def _freezes(pair: Pair) -> None:
    for step, is_trained in enumerate((True, False, True)):
        for inner in (pair.inner, pair.alone):
            inner.blocks[1].requires_grad_(is_trained)
        pair.loss(step).backward()
        pair.pass_alone(step)
        pair.step()
    pair.require_equal()


def _may_leave_out(pair: Pair) -> None:
    for step in range(2):
        pair.loss(step, 1 if pair.rank else None).backward()
        pair.pass_alone(step, skipped=dict.fromkeys(range(1, pair.world_size), 1))
        pair.step()
    pair.require_equal()


def _names_unused(pair: Pair) -> None:
    pair.loss(0, 1 if pair.rank else None).backward()
    found = {unused.name: unused.ranks for unused in pair.model.explain_unused()}
    others = tuple(range(1, pair.world_size))
    assert found == {"blocks.1.weight": others, "blocks.1.bias": others}


def _tells_times(pair: Pair) -> None:
    record_statistics(pair.model)
    _trains_once(pair)
    stats = synchronization_stats(pair.model)
    assert stats is not None
    assert [bucket.num_bytes for bucket in stats.buckets] == message_sizes(pair.model)
    assert stats.exposed_wait_s is not None


def _saves_for_any(pair: Pair) -> None:
    """Saves on all ranks and loads into a plain module in one process."""
    _trains_once(pair)
    with tempfile.TemporaryDirectory(prefix="paceline-features-") as own:
        paths = [own]
        dist.broadcast_object_list(paths, 0)
        path = pathlib.Path(paths[0]) / "checkpoint"
        dcp.save({"model": get_model_state_dict(pair.model)}, checkpoint_id=path)
        if pair.rank == 0:
            state: dict[str, Any] = {"model": Layers().state_dict()}
            dcp.load(state, checkpoint_id=path, no_dist=True)
            for name, expected in pair.alone.state_dict().items():
                torch.testing.assert_close(state["model"][name], expected, atol=1e-5, rtol=1e-5)
        dist.barrier()


FEATURES: dict[str, tuple[Callable[[Pair], None], dict[StrategyName, Cell]]] = {
    "equals one process": (_trains, dict.fromkeys(STRATEGIES, "yes")),
    "`no_sync`": (_accumulates, dict.fromkeys((*OURS, "torch_ddp", "torch_zero"), "yes")),
    "`container.clip_grad_norm_`": (
        _clips,
        dict.fromkeys((*_WITH_WHOLE_GRADIENTS, "zero2", "fsdp"), "yes"),
    ),
    "`torch.nn.utils.clip_grad_norm_`": (
        _is_clipped_by_torch,
        {**dict.fromkeys((*_WITH_WHOLE_GRADIENTS, "fsdp", *_TORCHS), "yes"), "zero2": "refused"},
    ),
    "`set_gradient_weight`": (_weighs, dict.fromkeys(OURS, "yes")),
    "freeze and unfreeze": (_freezes, dict.fromkeys(OURS, "yes")),
    "unused on some ranks": (_may_leave_out, dict.fromkeys(OURS, "yes")),
    "`explain_unused`": (_names_unused, dict.fromkeys(OURS, "yes")),
    "`synchronization_stats`": (_tells_times, dict.fromkeys((*OURS, "torch_fsdp2"), "yes")),
    "checkpoint for any world size": (_saves_for_any, dict.fromkeys(STRATEGIES, "yes")),
}
"""By feature: its check, and the expected cell of each strategy."""


def show(rank: int, world_size: int, strategy: StrategyName, feature: str) -> None:
    """Runs the check of a cell."""
    check, _ = FEATURES[feature]
    check(Pair(rank, world_size, strategy))


def table() -> str:
    """Returns the docs' table in Markdown."""
    names = list(FEATURES)
    lines = [f"| strategy | {' | '.join(names)} |", f"|{' --- |' * (len(names) + 1)}"]
    for strategy in STRATEGIES:
        cells = [FEATURES[name][1].get(strategy, "") for name in names]
        lines.append(f"| `{strategy}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
