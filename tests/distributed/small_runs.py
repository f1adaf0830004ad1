"""Training runs of a small model on random tokens, for distributed tests."""

import dataclasses
import pathlib
from typing import Any

import msgspec

from paceline.data.loader.config import SourceConfig
from paceline.data.manifest import MANIFEST, encode_manifest, read_manifest
from paceline.data.storage import open_storage
from paceline.data.tokenizer import byte_tokenizer_json
from paceline.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StepConfig,
)
from paceline.training.metrics import MetricsFile, StepRow
from paceline.training.run import run
from tests import devices
from tests.unit.data.dataset_factory import random_documents, write_dataset


def small_run(place: pathlib.Path) -> RunConfig:
    """Writes byte tokens for training and held-out splits; returns the config of a run on them."""
    tokens = place / "tokens"
    tokenizer = byte_tokenizer_json().encode()
    splits = {}
    for split, number in (("heldout", 400), ("train", 2000)):
        documents = random_documents(number)
        write_dataset(tokens, documents, split=split, shard_tokens=1000, tokenizer=tokenizer)
        splits |= read_manifest(open_storage(tokens)).splits
    manifest = read_manifest(open_storage(tokens))
    manifest = msgspec.structs.replace(manifest, splits=splits)
    open_storage(tokens).write(MANIFEST, encode_manifest(manifest))
    return RunConfig(
        out=str(place / "run"),
        model=ModelConfig(num_layers=2, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2),
        data=DataConfig(sources=(SourceConfig(place=str(tokens)),), context_length=16),
        training=StepConfig(steps=3, batch_size=4, micro_batch_size=2),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(name="constant", warmup_steps=0),
        checkpoint=CheckpointConfig(every_steps=3),
        evaluation=EvaluationConfig(sequences=0),
    )


def train_rank(rank: int, world_size: int, config: RunConfig) -> None:
    """Trains on this rank."""
    run(config, devices.session_of(rank, world_size))


def losses_of(config: RunConfig) -> list[float]:
    rows = MetricsFile(pathlib.Path(config.out) / "metrics.jsonl").read()
    return [row.loss for row in rows if isinstance(row, StepRow)]


def changed(config: RunConfig, out: str, **sections: dict[str, Any]) -> RunConfig:
    changed = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in sections.items()
    }
    return dataclasses.replace(config, out=str(pathlib.Path(config.out).parent / out), **changed)
