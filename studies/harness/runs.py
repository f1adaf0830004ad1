"""Small training runs on a sample text, for studies that train."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.core.files import atomic_file
from paceline.data.loader.config import SourceConfig
from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.run import prepare
from paceline.parallel import Session
from paceline.parallel.ranks.placement import local_placement
from paceline.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    StepConfig,
)
from paceline.training.metrics import MetricsFile, StepRow
from paceline.training.run import run
from paceline.training.toml_config import encode_config


def sample_run(
    place: pathlib.Path,
    name: str,
    *,
    model: ModelConfig,
    context: int,
    training: StepConfig,
    **sections: Any,
) -> RunConfig:
    """Returns the config of a run in `place / name` on the sample text, without evaluation.

    Args:
        place: Directory of the sample text and of the run.
        name: The run's directory.
        model: The model.
        context: Tokens per sequence.
        training: Steps and batch sizes.
        sections: Further sections of the config.
    """
    return RunConfig(
        out=str(place / name),
        model=model,
        data=DataConfig(
            sources=(SourceConfig(place=prepare_sample(place)),), context_length=context
        ),
        training=training,
        evaluation=EvaluationConfig(sequences=0),
        **sections,
    )


def run_to_disturb(
    place: pathlib.Path, name: str, *, steps: int, saves_every: int, parallel: ParallelConfig
) -> RunConfig:
    """Returns the config of the run that fault studies disturb: two small layers."""
    return sample_run(
        place,
        name,
        model=ModelConfig(num_layers=2, d_model=64, d_ff=128, num_heads=4, num_kv_heads=4),
        context=32,
        training=StepConfig(steps=steps, batch_size=8),
        parallel=parallel,
        checkpoint=CheckpointConfig(every_steps=saves_every),
        logging=LoggingConfig(every_steps=100),
    )


def prepare_sample(place: pathlib.Path) -> str:
    """Prepares a text that is identical on every machine; returns the path of its tokens."""
    text = "".join(f"{number} bottles of water on the wall.\n" for number in range(20_000))
    (place / "text.txt").write_text(text)
    tokens = str(place / "tokens")
    prepare(PrepareConfig(sources=(str(place / "text.txt"),), tokenizer="bytes", out=tokens))
    return tokens


def write_config(config: RunConfig) -> pathlib.Path:
    """Writes the config next to the run's directory and returns its path.

    Atomically: a command that begins at the same time must not read half of it.
    """
    path = pathlib.Path(f"{config.out}.toml")
    with atomic_file(path) as file:
        file.write(encode_config(config).encode())
    return path


def local_session(rank: int, world_size: int) -> Session:
    """Returns the session of a rank on this machine's CPU."""
    placement = local_placement("spawn", rank, world_size)
    return Session(placement=placement, device=torch.device("cpu"), backend="gloo")


def train_rank(rank: int, world_size: int, config: RunConfig) -> None:
    """Trains on this rank."""
    run(config, local_session(rank, world_size))
    dist.barrier()


def steps_of(config: RunConfig) -> list[StepRow]:
    """Returns the steps that a run has recorded."""
    rows = MetricsFile(f"{config.out}/metrics.jsonl").read()
    return [row for row in rows if isinstance(row, StepRow)]


@contextlib.contextmanager
def fake_rank(world_size: int, rank: int = 0) -> Iterator[None]:
    """Makes this process a rank of torch's fake process group, which sends nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
