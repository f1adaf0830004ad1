"""Measures the overhead of elastic replicas over ranks while no replica leaves or joins.

Two processes train the same model twice, once as replicas (`parallel.elastic = "replicas"`) and
once as ranks of one process group, with the same calls as the two training loops. They take turns
of ten steps; the order alternates. Requires torchft. Appends one `comparison` record to the store.

    python -m studies.training.elastic_overhead results/elastic-overhead.jsonl
"""

import contextlib
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer

from paceline.data.loader.torch_batches import TorchLoader
from paceline.parallel import Session
from paceline.training.config import RunConfig
from paceline.training.forecast import layout_of
from paceline.training.observers import Observers
from paceline.training.parallelize import build
from paceline.training.replica_launch import LIGHTHOUSE, NUM_REPLICAS, REPLICA, loopback_address
from paceline.training.replicas import Replicas, Reporter
from paceline.training.run_directory import METRICS
from paceline.training.step import TrainingStep
from studies.harness.runs import local_session
from studies.harness.turns import interleaved
from studies.training.turns import RANKS, TURN, compare_turns, turns_arguments


class RankSteps:
    """Training steps of a rank."""

    def __init__(self, config: RunConfig, session: Session, stack: contextlib.ExitStack) -> None:
        train_state = build(config, layout_of(config, session.world_size), session)
        self._runner = TrainingStep(config.training, train_state, session.device)
        self._loader = stack.enter_context(
            TorchLoader(config.loader(), rank=session.rank, world_size=session.world_size)
        )

    def turn(self) -> float:
        """Runs one turn and returns its seconds."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(TURN):
            batch = next(self._loader)
            self._runner.run(batch.tokens, batch.targets, digest=batch.digest or 0)
        return time.perf_counter() - began


class ReplicaSteps:
    """Training steps of a replica."""

    def __init__(
        self, config: RunConfig, number: int, lighthouse: str, stack: contextlib.ExitStack
    ) -> None:
        device = torch.device("cpu")
        train_state = build(config, layout_of(config, 1), local_session(0, 1))
        os.environ |= {REPLICA: str(number), NUM_REPLICAS: str(RANKS), LIGHTHOUSE: lighthouse}
        reporter = Reporter(pathlib.Path(config.out) / METRICS, lambda: Observers([]))
        self._replicas = Replicas(config, train_state, device, reporter)
        stack.enter_context(self._replicas.data)
        stack.callback(self._replicas.close)
        self._runner = TrainingStep(config.training, train_state, device, replicas=self._replicas)
        self._replicas.join(lambda: 0)

    def turn(self) -> float:
        """Runs one turn and returns its seconds."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(TURN):
            self._replicas.begin_step()
            batch = next(self._replicas.data)
            result = self._runner.run(batch.tokens, batch.targets, digest=batch.digest or 0)
            if not result.is_committed or self._replicas.members.live != RANKS:
                raise RuntimeError("a replica was lost while steps were timed")
            self._replicas.after_update()
        return time.perf_counter() - began


def run_both(
    rank: int, world_size: int, config: RunConfig, turns: int, lighthouse: str
) -> dict[str, list[float]]:
    """Returns the seconds of turns as a replica and as a rank."""
    with contextlib.ExitStack() as stack:
        replica = ReplicaSteps(config, rank, lighthouse, stack)
        own = RankSteps(config, local_session(rank, world_size), stack)
        return interleaved({"replicas": replica.turn, "ranks": own.turn}, turns)


def main() -> int:
    """Measures, prints and records the overhead."""
    arguments = turns_arguments(__doc__)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=RANKS, join_timeout_ms=60_000)
    compare_turns(arguments, run_both, loopback_address(lighthouse))
    lighthouse.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
