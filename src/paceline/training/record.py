"""Writes a record of a finished run, so that runs can be compared like any measurement."""

import pathlib

import torch

from paceline.core.presets import model_preset
from paceline.core.runnable import needs_mesh
from paceline.core.specs import BatchShape
from paceline.kernels.attention.api import resolve_implementation
from paceline.parallel import Session
from paceline.parallel.mesh.layout import describe
from paceline.parallel.ranks.hardware import describe_hardware
from paceline.records import CaseValue, Record, RecordStore, capture_environment
from paceline.records.kinds import MODEL_FIELDS
from paceline.records.schema import model_case_fields
from paceline.training.config import RunConfig
from paceline.training.forecast import Forecast, ResolvedRun
from paceline.training.metrics import FINISHED, EventRow, MetricsFile, MetricsRow, run_metrics
from paceline.training.run_directory import METRICS, RECORD


class RecordObserver:
    """Appends the record of a run when it finishes."""

    def __init__(self, run: ResolvedRun, session: Session, expected: Forecast) -> None:
        self._run = run
        self._session = session
        self._expected = expected

    def log(self, row: MetricsRow) -> None:
        """Writes the record from the rows of all attempts when the last step is done."""
        if not isinstance(row, EventRow) or row.name != FINISHED:
            return
        directory = pathlib.Path(self._run.config.out)
        rows = list(MetricsFile(directory / METRICS).read())
        RecordStore(directory / RECORD).append(
            Record(
                kind="training_run",
                case=run_case(self._run, self._session),
                environment=capture_environment(),
                metrics=run_metrics(rows, self._expected),
                outcome="ok",
            )
        )

    def close(self) -> None:
        """Does nothing: the record is already written."""


def run_case(run: ResolvedRun, session: Session) -> dict[str, CaseValue]:
    """Returns every setting that affects the expected speed and loss of a run."""
    config, location = run.config, describe_hardware(session.device)
    strategy = config.parallel.strategy_on(session.world_size)
    return {
        "strategy": strategy,
        "bucket_size_mb": config.parallel.bucket_size_for(strategy),
        **_model_case(config, location.device),
        "precision": config.training.precision,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "compile": "blocks" if config.model.compile_blocks else "none",
        "activation_checkpointing": config.model.activation_checkpointing,
        "optimizer": config.optimizer.name,
        "world_size": session.world_size,
        "num_hosts": session.placement.num_hosts,
        "backend": session.backend,
        **location.as_case(),
        "layout": describe(run.layout) if needs_mesh(run.layout) else None,
        "steps": config.training.steps,
        "batch_size": config.training.batch_size,
        "learning_rate": config.optimizer.learning_rate,
        "schedule": config.schedule.name,
        "seed": config.training.seed,
    }


def _model_case(config: RunConfig, device: str) -> dict[str, CaseValue]:
    """Returns the case fields of the model; the dimensions of a Hugging Face model are None."""
    batch = BatchShape(
        num_sequences=config.training.micro_batch_size, context_length=config.data.context_length
    )
    if (foreign := config.model.hugging_face) is not None:
        return {
            **dict.fromkeys(MODEL_FIELDS, None),
            "model": pathlib.Path(foreign).name,
            "batch": batch.num_sequences,
            "context": batch.context_length,
            "attention": "transformers",
        }
    shape, preset = config.model.shape, config.model.preset
    name = preset if shape == model_preset(preset) else "custom"
    return {
        **model_case_fields(name, shape, batch),
        "attention": resolve_implementation("auto", device),
    }
