"""Measures the overhead of watching a run in which nothing fails.

Two ranks train the same model twice in one process: once with the defaults of `[watch]`, and once
without hashes and straggler detection. Both make the same calls as `paceline.training.loop.train`.
They take turns of ten steps, so that each turn has one comparison of the ranks' hashes; the order
alternates. The watchdog thread runs in both. Appends one `comparison` record to the store.

    python scripts/watch_overhead.py results/watch-overhead.jsonl
"""

import contextlib
import dataclasses
import pathlib
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from turns import RANKS, TURN, make_config, parse_arguments, record_turns, take_turns

from paceline.data.loader.torch_batches import TorchLoader
from paceline.parallel import Session, run_ranks
from paceline.parallel.ranks.placement import local_placement
from paceline.training.config import RunConfig
from paceline.training.health.config import WatchConfig
from paceline.training.health.monitor import Watch
from paceline.training.parallelize import build
from paceline.training.step import TrainingStep


class WatchedSteps:
    """Training steps with the same watch calls as in the training loop."""

    def __init__(self, config: RunConfig, session: Session, stack: contextlib.ExitStack) -> None:
        trainee = build(config, session)
        self._watch = Watch(config, session, trainee)
        self._runner = TrainingStep(
            config.training,
            trainee.model,
            list(trainee.optimizers.values()),
            session.device,
            self._watch,
        )
        self._loader = stack.enter_context(
            TorchLoader(config.loader(), rank=session.rank, world_size=session.world_size)
        )
        stack.enter_context(self._watch.dog)
        self._step = 0

    def turn(self) -> float:
        """Runs one turn and returns its seconds."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(TURN):
            self._watch.begin_step()
            batch = next(self._loader)
            result = self._runner.run(batch.tokens, batch.targets, digest=batch.digest or 0)
            if self._watch.refusal is not None:
                raise RuntimeError(f"step {self._step + 1} was not taken: {self._watch.refusal}")
            self._step += 1
            self._watch.hold()
            self._watch.findings(self._step, result)
            damage = self._watch.find_damage(self._step, at_once=False)
            if damage is not None:
                raise RuntimeError(damage)
        return time.perf_counter() - began


def run_both(
    rank: int, world_size: int, config: RunConfig, turns: int
) -> tuple[list[float], list[float]]:
    """Returns the seconds of turns with and without watching."""
    placement = local_placement("spawn", rank, world_size)
    session = Session(placement=placement, device=torch.device("cpu"), backend="gloo")
    off = WatchConfig(hash_every_steps=0, stragglers=False)
    with contextlib.ExitStack() as stack:
        watched = WatchedSteps(config, session, stack)
        unwatched = WatchedSteps(dataclasses.replace(config, watch=off), session, stack)
        return take_turns(watched.turn, unwatched.turn, turns)


def main() -> int:
    """Measures, prints and records the overhead."""
    arguments = parse_arguments(__doc__.partition("\n")[0])
    with tempfile.TemporaryDirectory() as directory:
        config = make_config(arguments, pathlib.Path(directory))
        times = run_ranks(run_both, RANKS, config, arguments.turns, timeout_s=7200)[0]
    record_turns(arguments, "watched", "unwatched", *times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
