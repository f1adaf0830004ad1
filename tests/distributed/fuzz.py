"""Runs random training programs under containers and, on rank 0, also in a single process."""

import contextlib
import pathlib
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.checkpoint import checkpoint

from paceline.parallel import (
    BucketedDataParallel,
    FlatDataParallel,
    FullyShardedDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
    OverlapWarning,
    ShardedDataParallel,
    ShardedOptimizer,
)
from tests.distributed.fuzz_programs import NUM_BLOCKS, Pass, Step, make_program

WIDTH = 6
DTYPE = torch.float64
TOLERANCE = 1e-9
"""Another summation order causes differences 100,000 times smaller. Lost values, or values that
were float32 in between, cause far larger ones. In float32 the two could not be distinguished: some
programs amplify rounding errors."""
# Momentum updates a parameter with a zero gradient, but not one without any. No weight decay:
# torch.distributed.checkpoint would turn it into momentum for parameters saved without momentum.
_OPTIONS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}

MAKE: dict[str, Callable[..., nn.Module]] = {
    "naive": lambda module, _size_mb, **kw: NaiveDataParallel(module, **kw),
    "flat": lambda module, _size_mb, **kw: FlatDataParallel(module, **kw),
    "overlapped": lambda module, _size_mb, **kw: OverlappedDataParallel(module, **kw),
    "ddp": BucketedDataParallel,
    "zero1": BucketedDataParallel,
    "zero2": ShardedDataParallel,
    "fsdp": lambda module, _size_mb, **kw: FullyShardedDataParallel(module, **kw),
}
_SHARD_THE_OPTIMIZER = ("zero1", "zero2")


class Net(nn.Module):
    """A stem, skippable blocks, tied weights, a transposed weight, a scalar, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.scale = nn.Parameter(torch.ones(()))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.stem.weight
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.to(DTYPE)

    def forward(self, x: Tensor, used: frozenset[int], recomputes: bool, runs_all: bool) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        outputs = [hidden]
        for number, block in enumerate(self.blocks):
            if number in used or runs_all:
                y = checkpoint(block, hidden, use_reentrant=False) if recomputes else block(hidden)
                if number in used:
                    outputs.append(y)
        total = torch.stack(outputs).sum(0)
        return self.tied((total * self.scale) @ self.turned)


class Subject:
    """A model with its optimizer: either the container or the single-process reference."""

    def __init__(self, model: nn.Module, optimizer: Any, inner: Net) -> None:
        self.model = model
        self.optimizer = optimizer
        self.inner = inner

    def prepare(self, step: Step) -> None:
        """Freezes and unfreezes blocks, and sets train or eval mode."""
        self.model.train(not step.freezes_in_eval)
        for number, block in enumerate(self.inner.blocks):
            block.requires_grad_(number not in step.frozen)
        self.model.train(not step.trains_in_eval)

    def finish(self, step: Step) -> None:
        """Steps the optimizer and clears gradients."""
        self.optimizer.step()
        cleared = self.model if step.zeroes == "container" else self.optimizer
        cleared.zero_grad(set_to_none=step.set_to_none or bool(step.frozen))


def data(seed: int, place: tuple[int, ...], rank: int, second: bool) -> Tensor:
    number = hash((seed, place, rank, second)) % 2**31
    generator = torch.Generator().manual_seed(number)
    return torch.randn(3, WIDTH, generator=generator, dtype=DTYPE)


class Run:
    """One program, run on this rank and, on rank 0, also in a single process."""

    def __init__(self, kind: str, seed: int, rank: int, groups: dict[int, Any]) -> None:
        self._kind = kind
        self._seed = seed
        self._rank = rank
        self._groups = groups
        self._program = make_program(kind, seed, max(groups))
        self._runs_all = kind == "fsdp"
        self._norms: list[tuple[Tensor, Tensor]] = []
        torch.manual_seed(seed)
        inner = Net()
        self._alone = Subject(inner, torch.optim.SGD(inner.parameters(), **_OPTIONS), inner)

    def differences(self) -> dict[str, float]:
        """Runs the program and returns each parameter's and norm's difference from one process.

        Differences are relative to the largest magnitude. Ranks without a part in the last half
        return none.
        """
        ours: Subject | None = None
        with tempfile.TemporaryDirectory(prefix="paceline-fuzz-") as own:
            paths = [own]
            dist.broadcast_object_list(paths, 0)
            path = pathlib.Path(paths[0]) / "checkpoint"
            halves = zip(self._program.halves, self._program.num_ranks, strict=True)
            for half, (steps, num_ranks) in enumerate(halves):
                # Checkpoints contain no gradients, so the reference drops its own, even zeros.
                self._alone.optimizer.zero_grad(set_to_none=True)
                if self._rank < num_ranks:
                    ours = self._make(num_ranks)
                    if half:
                        self._load(ours, path, num_ranks)
                    for number, step in enumerate(steps):
                        self._train(ours, step, (half, number), num_ranks)
                    if half + 1 < len(self._program.halves):
                        self._save(ours, path, num_ranks)
                dist.barrier()
            if self._rank >= self._program.num_ranks[-1]:
                return {}
            assert ours is not None
            return self._compare(ours, self._program.num_ranks[-1])

    def _make(self, num_ranks: int) -> Subject:
        torch.manual_seed(self._seed + self._rank)
        inner = Net()
        if self._rank == 0:
            inner.load_state_dict(self._alone.inner.state_dict())
        group = self._groups[num_ranks]
        model = MAKE[self._kind](inner, self._program.bucket_size_mb, process_group=group)
        parameters = model.parameters()
        optimizer: Any
        if self._kind in _SHARD_THE_OPTIMIZER:
            optimizer = ShardedOptimizer(
                parameters, torch.optim.SGD, process_group=group, **_OPTIONS
            )
        else:
            optimizer = torch.optim.SGD(parameters, **_OPTIONS)
        return Subject(model, optimizer, inner)

    def _train(self, ours: Subject, step: Step, place: tuple[int, ...], num_ranks: int) -> None:
        subjects = [ours, self._alone] if self._rank == 0 else [ours]
        for subject in subjects:
            subject.prepare(step)
        if step.looks_in_eval:
            ours.model.eval()
            with torch.no_grad():
                self._loss(ours.model, step.passes[0], place, self._rank)
            ours.model.train(not step.trains_in_eval)
        for number, one in enumerate(step.passes):
            self._pass(ours.model, one, (*place, number))
            if self._rank == 0:
                self._pass_alone(one, (*place, number), num_ranks)
        if step.max_norm is not None:
            norm = ours.model.clip_grad_norm_(step.max_norm)
            if self._rank == 0:
                parameters = self._alone.inner.parameters()
                expected = nn.utils.clip_grad_norm_(parameters, step.max_norm)
                self._norms.append((norm, expected))
        for subject in subjects:
            subject.finish(step)

    def _pass(self, model: nn.Module, one: Pass, place: tuple[int, ...]) -> None:
        if one.weights is not None:
            model.set_gradient_weight(one.weights[self._rank])
        with self._silence(model, one.local in ("forward", "both")):
            loss = self._loss(model, one, place, self._rank)
        with self._silence(model, one.local in ("backward", "both")):
            if one.two_backwards:
                loss.backward(retain_graph=True)
            loss.backward()

    def _pass_alone(self, one: Pass, place: tuple[int, ...], num_ranks: int) -> None:
        weights = one.weights[:num_ranks] if one.weights else ()
        if not sum(weights):
            weights = (1,) * num_ranks
        total = sum(
            self._loss(self._alone.model, one, place, rank) * (weight / sum(weights))
            for rank, weight in enumerate(weights)
        )
        ((1 + one.two_backwards) * total).backward()

    def _loss(self, model: nn.Module, one: Pass, place: tuple[int, ...], rank: int) -> Tensor:
        loss = torch.zeros((), dtype=DTYPE)
        for second in (False, True) if one.two_forwards else (False,):
            used = one.used[(rank + second) % len(one.used)]
            x = data(self._seed, place, rank, second)
            loss = loss + model(x, used, one.recomputes, self._runs_all).square().mean()
        return loss

    def _silence(self, model: nn.Module, is_local: bool) -> contextlib.AbstractContextManager[None]:
        return model.no_sync() if is_local else contextlib.nullcontext()

    def _save(self, ours: Subject, path: pathlib.Path, num_ranks: int) -> None:
        state = {"model": get_model_state_dict(ours.model)}
        if isinstance(ours.optimizer, ShardedOptimizer):
            state["optimizer"] = ours.optimizer.checkpoint_state(ours.model)
        else:
            state["optimizer"] = get_optimizer_state_dict(ours.model, ours.optimizer)
        dcp.save(state, checkpoint_id=path, process_group=self._groups[num_ranks])

    def _load(self, ours: Subject, path: pathlib.Path, num_ranks: int) -> None:
        group = self._groups[num_ranks]
        state = {"model": get_model_state_dict(ours.model)}
        is_sharded = isinstance(ours.optimizer, ShardedOptimizer)
        if not is_sharded:
            state["optimizer"] = get_optimizer_state_dict(ours.model, ours.optimizer)
        # torch creates state for parameters that never had a gradient, and requires it here.
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=path, process_group=group, planner=planner)
        set_model_state_dict(ours.model, state["model"])
        if is_sharded:
            ours.optimizer.load_checkpoint(ours.model, dcp.FileSystemReader(path))
        else:
            set_optimizer_state_dict(ours.model, ours.optimizer, state["optimizer"])

    def _compare(self, ours: Subject, num_ranks: int) -> dict[str, float]:
        full = ours.model.full_state_dict()
        expected = self._alone.inner.state_dict()
        found = {}
        for name, values in expected.items():
            values = values.contiguous()
            dist.broadcast(values, 0, group=self._groups[num_ranks])
            found[name] = _difference(full[name], values)
        for number, (norm, alone) in enumerate(self._norms):
            found[f"norm {number}"] = _difference(norm, alone)
        return found


def _difference(ours: Tensor, theirs: Tensor) -> float:
    scale = float(theirs.abs().max()) + 1e-3
    difference = float((ours - theirs).abs().max()) / scale
    return difference if difference == difference else float("inf")


class Outcome(NamedTuple):
    """The parameter or norm of a program that differs most from one process."""

    seed: int
    name: str
    difference: float


def run_programs(rank: int, world_size: int, kind: str, seeds: range) -> list[Outcome]:
    """Runs programs. Returns the outcomes of those whose last half includes this rank."""
    warnings.simplefilter("ignore", OverlapWarning)  # Programs have unused layers.
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world_size)}
    groups[world_size] = dist.group.WORLD
    outcomes = []
    try:
        for seed in seeds:
            try:
                found = Run(kind, seed, rank, groups).differences()
            except BaseException as error:
                error.add_note(f"{kind}, seed {seed}: {make_program(kind, seed, world_size)}")
                raise
            if found:
                worst = max(found, key=lambda name: found[name])
                outcomes.append(Outcome(seed, worst, found[worst]))
    finally:
        for size in range(1, world_size):
            if rank < size:
                dist.destroy_process_group(groups[size])
    return outcomes
