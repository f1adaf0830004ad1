"""Measures how far losses diverge when a run resumes on other ranks or under another strategy.

Reference runs train 100 steps without interruption. Other runs resume from their checkpoints at
step 50, on another number of ranks or under another strategy. Appends one `comparison` record per
move to the store, with the largest relative difference of the 50 losses that follow.

    python -m studies.training.train_continue results/train-continue.jsonl
"""

import dataclasses
import pathlib
import shutil
import sys
import tempfile

from paceline.core.strategies import StrategyName
from paceline.parallel import RankPool
from paceline.training.config import (
    CheckpointConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    StepConfig,
)
from studies.harness.records import append_record, machine_case
from studies.harness.runs import sample_run, steps_of, train_rank
from studies.harness.study import study_parser

STEPS, MOVED_AFTER = 100, 50
Layout = tuple[int, StrategyName]
MOVES: tuple[tuple[Layout, Layout], ...] = (
    ((2, "ddp"), (1, "ddp")),
    ((2, "ddp"), (4, "ddp")),
    ((4, "ddp"), (3, "ddp")),
    ((4, "fsdp"), (3, "fsdp")),
    ((2, "ddp"), (2, "zero2")),
    ((2, "zero2"), (2, "fsdp")),
    ((2, "fsdp"), (2, "torch_fsdp2")),
    ((2, "torch_fsdp2"), (2, "ddp")),
)


class Runs:
    """Trains reference runs, each only once, and runs that move to another layout."""

    def __init__(self, place: pathlib.Path, config: RunConfig) -> None:
        self._place = place
        self._config = config

    def config(self, name: str, layout: Layout) -> RunConfig:
        """Returns the config of a run under a layout's strategy."""
        return dataclasses.replace(
            self._config, out=str(self._place / name), parallel=ParallelConfig(strategy=layout[1])
        )

    def never_moved(self, layout: Layout) -> RunConfig:
        """Trains an uninterrupted run, unless it exists; returns its config."""
        config = self.config(f"{layout[1]}-{layout[0]}", layout)
        if not pathlib.Path(config.out).exists():
            _train_on(layout[0], config)
        return config

    def moved(self, source: RunConfig, before: Layout, after: Layout) -> RunConfig:
        """Trains the second half in another layout; returns the config."""
        config = self.config(f"{before[1]}-{before[0]}-to-{after[1]}-{after[0]}", after)
        step = f"checkpoints/step-{MOVED_AFTER:08d}"
        shutil.copytree(f"{source.out}/{step}", f"{config.out}/{step}")
        _train_on(after[0], config)
        return config


def _train_on(num_ranks: int, config: RunConfig) -> None:
    with RankPool(num_ranks, timeout_s=600) as pool:
        pool.run(train_rank, config)


def main() -> int:
    """Trains all runs, and prints and records the differences."""
    arguments = study_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        config = sample_run(
            place,
            "run",
            model=ModelConfig(num_layers=2, d_model=64, d_ff=128, num_heads=2),
            context=64,
            training=StepConfig(steps=STEPS, batch_size=12, micro_batch_size=2),
            checkpoint=CheckpointConfig(every_steps=MOVED_AFTER),
        )
        runs = Runs(place, config)
        for before, after in MOVES:
            source = runs.never_moved(before)
            moved = steps_of(runs.moved(source, before, after))
            expected = steps_of(source)[MOVED_AFTER:]
            worst = max(abs(a.loss - b.loss) / b.loss for a, b in zip(moved, expected, strict=True))
            case = {
                "subject": f"{after[0]} ranks, {after[1]}",
                "baseline": f"{before[0]} ranks, {before[1]}",
                "operation": f"{STEPS - MOVED_AFTER} steps after a move",
                **machine_case(),
            }
            append_record(arguments.store, "comparison", case, {"loss_difference": worst})
            print(f"{before} -> {after}: {worst:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
