"""Measures the overhead of elastic replicas over ranks while no replica leaves or joins.

Two processes train the same model twice, once as replicas (`parallel.elastic = "replicas"`) and
once as ranks of one process group, with the same calls as the two training loops. They take turns
of ten steps; the order alternates. Requires torchft. Appends one `comparison` record to the store.

    python -m studies.training.elastic_overhead results/elastic-overhead.jsonl
"""

import contextlib
import sys
import time

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer

from paceline.core.units import MIB
from paceline.data.loader.torch_batches import TorchLoader
from paceline.parallel import Session
from paceline.parallel.elastic import ReplicaGradients
from paceline.parallel.replica_group import ReplicaGroup
from paceline.training.config import RunConfig
from paceline.training.elastic.data import ReplicaData
from paceline.training.elastic.launch import loopback_address
from paceline.training.elastic.step import ReplicaStep
from paceline.training.parallelize import build
from paceline.training.step import TrainingStep
from studies.harness.runs import local_session
from studies.harness.turns import interleaved
from studies.training.turns import RANKS, TURN, compare_turns, turns_arguments


class RankSteps:
    """Training steps of a rank."""

    def __init__(self, config: RunConfig, session: Session, stack: contextlib.ExitStack) -> None:
        trainee = build(config, session)
        optimizers = list(trainee.optimizers.values())
        self._runner = TrainingStep(config.training, trainee.model, optimizers, session.device)
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
        trainee = build(config, local_session(0, 1))
        self._data = stack.enter_context(ReplicaData(config, RANKS, device))
        self._group = ReplicaGroup(
            number=number,
            lighthouse=lighthouse,
            state=dict,
            load=lambda _: None,
            timeout_s=config.parallel.replica_timeout_s,
            quorum_timeout_s=config.parallel.timeout_s,
        )
        stack.callback(self._group.close)
        gradients = ReplicaGradients(
            trainee.module.named_parameters(), self._group, config.parallel.bucket_size_mb * MIB
        )
        self._runner = ReplicaStep(config.training, trainee, self._group, gradients, device)

    def turn(self) -> float:
        """Runs one turn and returns its seconds."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(TURN):
            members = self._group.begin_step()
            batch = self._data.next(members)
            size = self._data.batch_size(members.live)
            if self._runner.run(batch, size, members, stop=False) is None or members.live != RANKS:
                raise RuntimeError("a replica was lost while steps were timed")
            self._data.commit()
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
