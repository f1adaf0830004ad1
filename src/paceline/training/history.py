"""Records predictions and measurements of finished runs, to correct later predictions."""

import pathlib
from collections.abc import Sequence

import msgspec

from paceline.accounting.parameters import count_parameters
from paceline.core.plan import Estimate
from paceline.predict.history import (
    HistoryEntry,
    Quantity,
    append_history,
    corrected,
    history_path,
    read_history,
)
from paceline.training.config import RunConfig
from paceline.training.metrics import Expectation
from paceline.training.run_files import EXPECTATION, last_record


def append_run_history(config: RunConfig) -> None:
    """Adds the predicted quantities of a finished run to the history."""
    path = history_path()
    append_history(path, predicted_and_measured(config, read_history(path)))


def predicted_and_measured(config: RunConfig, known: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    """Returns the predicted quantities of a finished run, paired with their measurements.

    Args:
        config: The run, whose directory contains its record.
        known: Earlier history, which corrects the predictions.
    """
    directory = pathlib.Path(config.out)
    record = last_record(directory)
    expected = msgspec.json.decode((directory / EXPECTATION).read_bytes(), type=Expectation)
    size = count_parameters(config.model.shape).total
    hardware = str(record.case["hardware"])
    world_size = int(str(record.case["world_size"]))
    measured = {name: metric.value for name, metric in record.metrics.items()}
    predictions: dict[Quantity, tuple[float | None, Estimate | None]] = {
        "heldout_loss": (None, expected.final_loss)
    }
    formulas: dict[Quantity, float | None] = {
        "step_time_s": expected.step_time_s,
        "memory_bytes": expected.memory_bytes,
    }
    for quantity, formula in formulas.items():
        if formula is not None:
            found = corrected(quantity, formula, hardware, world_size, known)
            predictions[quantity] = formula, found
    return [
        HistoryEntry(
            quantity=quantity,
            run=directory.resolve().name,
            parameters=size,
            world_size=world_size,
            threads=int(str(record.case["threads"])),
            hardware=hardware,
            formula=formula,
            predicted=predicted,
            measured=measured[quantity],
        )
        for quantity, (formula, predicted) in predictions.items()
        if predicted is not None and quantity in measured
    ]
