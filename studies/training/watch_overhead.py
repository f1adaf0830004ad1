"""Measures the overhead of watching a run in which nothing fails.

Two ranks train the same model twice in one process: once with the defaults of `[watch]`, and once
without hashes and straggler detection. Both make the same calls as `paceline.training.loop.train`.
They take turns of ten steps, so that each turn has one comparison of the ranks' hashes; the order
alternates. The watchdog thread runs in both. Appends one `comparison` record to the store.

    python -m studies.training.watch_overhead results/watch-overhead.jsonl
"""

import contextlib
import dataclasses
import sys
import time

import torch.distributed as dist

from paceline.data.loader.torch_batches import TorchLoader
from paceline.health.config import HealthConfig
from paceline.parallel import Session
from paceline.training.config import RunConfig
from paceline.training.forecast import layout_of
from paceline.training.loop import make_monitor
from paceline.training.parallelize import build
from paceline.training.step import TrainingStep
from studies.harness.runs import local_session
from studies.harness.turns import interleaved
from studies.training.turns import TURN, compare_turns, turns_arguments


class WatchedSteps:
    """Training steps with the same watch calls as in the training loop."""

    def __init__(self, config: RunConfig, session: Session, stack: contextlib.ExitStack) -> None:
        train_state = build(config, layout_of(config, session.world_size), session)
        self._monitor = make_monitor(config, config.watch, session, train_state)
        self._runner = TrainingStep(config.training, train_state, session.device, self._monitor)
        self._loader = stack.enter_context(
            TorchLoader(config.loader(), rank=session.rank, world_size=session.world_size)
        )
        stack.enter_context(self._monitor.watchdog)
        self._step = 0

    def turn(self) -> float:
        """Runs one turn and returns its seconds."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(TURN):
            self._monitor.begin_step()
            batch = next(self._loader)
            result = self._runner.run(batch.tokens, batch.targets, digest=batch.digest or 0)
            if self._monitor.skip_reason is not None:
                raise RuntimeError(
                    f"step {self._step + 1} was not taken: {self._monitor.skip_reason}"
                )
            self._step += 1
            self._monitor.update_checksum()
            self._monitor.findings(self._step, result.loss)
            damage = self._monitor.find_damage(self._step, at_once=False)
            if damage is not None:
                raise RuntimeError(damage)
        return time.perf_counter() - began


def run_both(rank: int, world_size: int, config: RunConfig, turns: int) -> dict[str, list[float]]:
    """Returns the seconds of turns with and without watching."""
    session = local_session(rank, world_size)
    off = HealthConfig(hash_every_steps=0, stragglers=False)
    with contextlib.ExitStack() as stack:
        watched = WatchedSteps(config, session, stack)
        unwatched = WatchedSteps(dataclasses.replace(config, watch=off), session, stack)
        return interleaved({"watched": watched.turn, "unwatched": unwatched.turn}, turns)


def main() -> int:
    """Measures, prints and records the overhead."""
    compare_turns(turns_arguments(__doc__), run_both)
    return 0


if __name__ == "__main__":
    sys.exit(main())
