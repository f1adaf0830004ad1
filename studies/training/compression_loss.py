"""Compares the held-out loss of runs with compressed gradients with that of uncompressed ones.

Two ranks train the same model on the same tokens in the same order, for each seed with and without
compression. Appends one `comparison` record per seed, strategy and compression.

    python -m studies.training.compression_loss results/compression-loss.jsonl tokens
"""

import argparse
import dataclasses
import pathlib
import tempfile
from typing import cast, get_args

from paceline.core.strategies import Compression, StrategyName
from paceline.data.loader.config import SourceConfig
from paceline.parallel import run_ranks
from paceline.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    StepConfig,
)
from paceline.training.metrics import EvaluationRow, MetricsFile
from studies.harness.records import append_record, machine_case
from studies.harness.runs import train_rank
from studies.harness.study import study_parser

_NUM_RANKS = 2
_HELD_OUT = 1024
_TIMEOUT_S = 4 * 3600.0


def _held_out_loss(config: RunConfig, directory: str) -> float:
    """Trains a run; returns its held-out loss after the last step."""
    parallel = config.parallel
    name = f"{parallel.strategy}-{parallel.compression}-{config.training.seed}"
    run = dataclasses.replace(config, out=f"{directory}/{name}")
    run_ranks(train_rank, _NUM_RANKS, run, timeout_s=_TIMEOUT_S)
    rows = MetricsFile(pathlib.Path(run.out) / "metrics.jsonl").read()
    return [row.loss for row in rows if isinstance(row, EvaluationRow)][-1]


def _config(arguments: argparse.Namespace, seed: int) -> RunConfig:
    never = 10**6
    return RunConfig(
        out="",
        model=ModelConfig(preset="bytes-6M"),
        data=DataConfig(sources=(SourceConfig(place=arguments.tokens),), context_length=64),
        training=StepConfig(
            steps=arguments.steps, batch_size=arguments.batch, micro_batch_size=64, seed=seed
        ),
        schedule=ScheduleConfig(warmup_steps=arguments.steps // 20),
        checkpoint=CheckpointConfig(every_steps=never),
        evaluation=EvaluationConfig(every_steps=never, sequences=_HELD_OUT),
    )


def main() -> None:
    """Trains every seed uncompressed and with each compression, and records each pair."""
    parser = study_parser(__doc__)
    parser.add_argument("tokens", help="a dataset of paceline data prepare --tokenizer bytes")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--strategy", default="ddp", choices=("ddp", "zero2"))
    parser.add_argument(
        "--compression", nargs="+", default=["int4"], choices=get_args(Compression)[1:]
    )
    arguments = parser.parse_args()
    strategy = cast(StrategyName, arguments.strategy)
    with tempfile.TemporaryDirectory() as directory:
        for seed in arguments.seeds:
            config = _config(arguments, seed)
            plain = ParallelConfig(strategy=strategy, timeout_s=_TIMEOUT_S)
            config = dataclasses.replace(config, parallel=plain)
            baseline = _held_out_loss(config, directory)
            for compression in arguments.compression:
                packed = dataclasses.replace(plain, compression=compression)
                loss = _held_out_loss(dataclasses.replace(config, parallel=packed), directory)
                difference = loss / baseline - 1
                append_record(
                    arguments.store,
                    "comparison",
                    {
                        "subject": f"{strategy} {compression}, seed {seed}",
                        "baseline": f"{strategy}, seed {seed}",
                        "operation": f"held-out loss after {arguments.steps:,} steps",
                        "model": config.model.preset,
                        "batch": config.training.batch_size,
                        "context": config.data.context_length,
                        "world_size": _NUM_RANKS,
                        **machine_case(_NUM_RANKS),
                    },
                    {"loss": loss, "baseline_loss": baseline, "loss_difference": difference},
                )
                print(f"{strategy} {compression}, seed {seed}: {loss:.4f}, {difference:+.2%}")


if __name__ == "__main__":
    main()
