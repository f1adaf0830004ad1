"""One rank's part of a run: the directory, the model, the loop."""

import pathlib
import sys

import msgspec

from paceline.core.errors import UsageError
from paceline.data.format.manifest import TOKENIZER, read_manifest
from paceline.data.storage import open_storage
from paceline.parallel import Session
from paceline.records.environment import capture_environment
from paceline.training.build import build
from paceline.training.config import RunConfig
from paceline.training.loop import RunOutcome, train
from paceline.training.metrics.observers import FileObserver, LogObserver, Observer, Observers
from paceline.training.metrics.rows import MetricsFile
from paceline.training.run_state import RunStates
from paceline.training.toml_config import encode_config

CONFIG, ENVIRONMENT, METRICS, CHECKPOINTS = (
    "config.toml",
    "environment.json",
    "metrics.jsonl",
    "checkpoints",
)
"""What is in the directory of a run, besides tokenizer.json."""


def run(config: RunConfig, session: Session) -> RunOutcome:
    """Trains, from the newest checkpoint if there is one."""
    directory = pathlib.Path(config.out)
    require_data(config)
    if config.training.batch_size < session.world_size:
        raise UsageError(
            f"training.batch_size {config.training.batch_size} leaves some of the "
            f"{session.world_size} ranks without a sequence; raise it, or start fewer ranks"
        )
    observers: list[Observer] = []
    metrics = MetricsFile(directory / METRICS)
    if session.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).write_text(encode_config(config), encoding="utf-8")
        open_storage(directory).write(TOKENIZER, _tokenizer(config))
        (directory / ENVIRONMENT).write_bytes(msgspec.json.encode(capture_environment()) + b"\n")
        observers = [
            FileObserver(metrics),
            LogObserver(config.logging.every_steps, config.training.steps, config.tokens_per_step),
        ]
    trainee = build(config, session)
    states = RunStates(config, session, str(directory / CHECKPOINTS))
    return train(config, session, trainee, states, Observers(observers, sys.stderr.write))


def require_data(config: RunConfig) -> None:
    """Raises unless every dataset is there and has tokens that the model knows."""
    for source in config.data.sources:
        manifest = read_manifest(open_storage(source.place))
        if manifest.vocab_size > config.model.shape.vocab_size:
            raise UsageError(
                f"{source.place} has tokens up to {manifest.vocab_size - 1:,}, the model a "
                f"vocabulary of {config.model.shape.vocab_size:,}; set model.vocab_size to "
                f"{manifest.vocab_size:,} or more"
            )
    kept = pathlib.Path(config.out) / TOKENIZER
    if kept.exists() and kept.read_bytes() != _tokenizer(config):
        raise UsageError(
            f"{kept} is another tokenizer than that of {config.data.sources[0].place}; prepare the "
            f"data with --tokenizer {kept}, or change out"
        )


def _tokenizer(config: RunConfig) -> bytes:
    """Returns tokenizer.json of the data, of which a mixture has one."""
    return open_storage(config.data.sources[0].place).read(TOKENIZER)
