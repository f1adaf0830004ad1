"""What watching costs when nothing fails: the trainer's steps with it, and without.

Two ranks train the same model twice in one process, once with the defaults of `[watch]` and once
with everything off, through the same calls as `paceline.training.loop.train`. They take turns, ten
steps at a time, so that each turn has one comparison of the ranks' hashes; which of them is first
alternates. The watchdog's thread runs beside both.

    python scripts/watch_overhead.py results/watch-overhead.jsonl
"""

import argparse
import contextlib
import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from sample_tokens import prepare_sample

from paceline.benchmarks.harness.measure import ratio_metric
from paceline.benchmarks.harness.records import measured
from paceline.data.loader.config import SourceConfig
from paceline.data.loader.torch_batches import TorchLoader
from paceline.parallel import Session, run_ranks
from paceline.parallel.ranks.hardware import describe_hardware
from paceline.parallel.ranks.placement import local_placement
from paceline.records import RecordStore
from paceline.training.build import build
from paceline.training.config import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    StepConfig,
)
from paceline.training.steps.step import TrainingStep
from paceline.training.watch.config import WatchConfig
from paceline.training.watch.watch import Watch

TURN = 10
"""Steps of a turn: `watch.hash_every_steps` as it is by default."""


class WatchedSteps:
    """The steps of a run, with its watch as the loop calls it."""

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
        """Returns the seconds of a turn."""
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
    """Returns the seconds of turns with watching and without."""
    placement = local_placement("spawn", rank, world_size)
    session = Session(placement=placement, device=torch.device("cpu"), backend="gloo")
    off = WatchConfig(hash_every_steps=0, stragglers=False)
    with contextlib.ExitStack() as stack:
        watched = WatchedSteps(config, session, stack)
        unwatched = WatchedSteps(dataclasses.replace(config, watch=off), session, stack)
        watched.turn(), unwatched.turn()
        with_s, without_s = [], []
        for number in range(turns):
            if number % 2:
                with_s.append(watched.turn())
            without_s.append(unwatched.turn())
            if not number % 2:
                with_s.append(watched.turn())
    return with_s, without_s


def main() -> int:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store")
    parser.add_argument("--model", default="bytes-34M")
    parser.add_argument("--strategy", default="bucketed")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--turns", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        prepare_sample(place)
        config = RunConfig(
            out=str(place / "run"),
            model=ModelConfig(preset=arguments.model),
            data=DataConfig(
                sources=(SourceConfig(place=str(place / "tokens")),),
                context_length=arguments.context,
            ),
            training=StepConfig(
                steps=10**6, batch_size=2 * arguments.batch, micro_batch_size=arguments.batch
            ),
            parallel=ParallelConfig(strategy=arguments.strategy),
            evaluation=EvaluationConfig(sequences=0),
        )
        watched, unwatched = run_ranks(run_both, 2, config, arguments.turns, timeout_s=7200)[0]
    ratio = ratio_metric(watched, unwatched)
    record = measured(
        "comparison",
        {
            "subject": f"{TURN} steps, watched",
            "baseline": "unwatched",
            "operation": arguments.strategy,
            "model": arguments.model,
            "batch": arguments.batch,
            "context": arguments.context,
            "world_size": 2,
            **describe_hardware(torch.device("cpu")).as_case(),
            "rounds": len(watched),
        },
        {"time_ratio": ratio, "time_s": watched, "baseline_time_s": unwatched},
    )
    RecordStore(arguments.store).append(record)
    print(
        f"{statistics.median(watched):.3f} s, unwatched {statistics.median(unwatched):.3f} s, "
        f"ratio {ratio.value:.4f} (95% {ratio.low:.4f} to {ratio.high:.4f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
