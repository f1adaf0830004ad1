"""The small run that fault studies disturb: two layers, trained on a sample text."""

import pathlib

from sample_tokens import prepare_sample

from paceline.data.loader.config import SourceConfig
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
from paceline.training.toml_config import encode_config


def study_run(
    place: pathlib.Path, name: str, *, steps: int, saves_every: int, parallel: ParallelConfig
) -> RunConfig:
    """Prepares the sample text in `place` and returns the config of a run in `place / name`."""
    return RunConfig(
        out=str(place / name),
        model=ModelConfig(num_layers=2, d_model=64, d_ff=128, num_heads=4, num_kv_heads=4),
        data=DataConfig(sources=(SourceConfig(place=prepare_sample(place)),), context_length=32),
        training=StepConfig(steps=steps, batch_size=8),
        parallel=parallel,
        checkpoint=CheckpointConfig(every_steps=saves_every),
        evaluation=EvaluationConfig(sequences=0),
        logging=LoggingConfig(every_steps=100),
    )


def write_config(config: RunConfig) -> pathlib.Path:
    """Writes the config next to the run's directory and returns its path."""
    path = pathlib.Path(f"{config.out}.toml")
    path.write_text(encode_config(config), encoding="utf-8")
    return path
