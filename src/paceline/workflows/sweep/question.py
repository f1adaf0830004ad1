"""Validates the config shared by a sweep's runs, and counts its training tokens."""

from paceline.core.errors import UsageError
from paceline.data.manifest import read_manifest
from paceline.data.storage import open_storage
from paceline.training.config import RunConfig


def require_evaluation(base: RunConfig) -> None:
    """Raises an error if evaluation is disabled, because runs could not be compared."""
    if not base.evaluation.sequences:
        raise UsageError(
            "evaluation.sequences is 0, and runs are compared by their held-out losses; set it to "
            "64 or more"
        )


def training_tokens(base: RunConfig) -> int:
    """Returns the number of tokens in the training splits."""
    manifests = [read_manifest(open_storage(source.place)) for source in base.data.sources]
    return sum(manifest.splits["train"].num_tokens for manifest in manifests)
