"""What a sweep reads of the config that its runs have in common."""

from paceline.core.errors import UsageError
from paceline.data.format.manifest import read_manifest
from paceline.data.storage import open_storage
from paceline.training.config import RunConfig


def require_evaluation(base: RunConfig) -> None:
    """Raises unless runs can be compared."""
    if not base.evaluation.sequences:
        raise UsageError(
            "evaluation.sequences is 0, and runs are compared by their held-out losses; set it to "
            "64 or more"
        )


def training_tokens(base: RunConfig) -> int:
    """Returns how many tokens there are to train on."""
    manifests = [read_manifest(open_storage(source.place)) for source in base.data.sources]
    return sum(manifest.splits["train"].num_tokens for manifest in manifests)
