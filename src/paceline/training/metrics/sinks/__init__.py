"""Experiment trackers that also receive a run's metrics; each is an extra of the package.

Nothing leaves the machine unless the user says so in the tracker's own environment variables.
"""

import importlib
import importlib.util
import pathlib
from collections.abc import Sequence

from paceline.core.errors import UsageError
from paceline.training.config import RunConfig, SinkName
from paceline.training.metrics.expectation import Expectation
from paceline.training.metrics.observers import Observer

_SINKS: dict[SinkName, str] = {
    "tensorboard": "TensorBoardSink",
    "wandb": "WandbSink",
    "mlflow": "MlflowSink",
}
"""Class of each tracker; the key is the package, the extra, and the prefix of the module here."""


def require_sinks(names: Sequence[SinkName]) -> None:
    """Raises unless the package of every tracker is installed."""
    for name in names:
        found = importlib.util.find_spec(name)
        # A directory of that name, such as W&B creates, looks like a package without an origin.
        if found is None or found.origin is None:
            raise UsageError(
                f"logging.sinks has {name}, which is not installed; `pip install "
                f"'paceline[{name}]'`, or remove it"
            )


def make_sinks(config: RunConfig, directory: pathlib.Path, expected: Expectation) -> list[Observer]:
    """Creates the trackers of a run; each opens at its first row.

    Args:
        config: The run.
        directory: Directory for their files.
        expected: Predictions and limits of the run.
    """
    sinks = []
    for name in config.logging.sinks:
        module = importlib.import_module(f"paceline.training.metrics.sinks.{name}_sink")
        sinks.append(getattr(module, _SINKS[name])(config, directory, expected))
    return sinks
