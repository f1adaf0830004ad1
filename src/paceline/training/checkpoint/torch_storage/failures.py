"""torch's failures of checkpoints as errors of ours, the same on all ranks.

torch gathers what failed on each rank, and raises it on all of them as a `CheckpointException`,
which is no `Exception`: who does not catch it by name does not catch it.
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from paceline.core.errors import PacelineError
from paceline.training.checkpoint.errors import CheckpointError, DamagedCheckpointError


@contextlib.contextmanager
def named_failures(what: str) -> Iterator[None]:
    """Raises a `CheckpointError` for what failed inside on any rank.

    Args:
        what: What is being done with which checkpoint.
    """
    try:
        if dist.is_initialized():
            yield
        else:
            with warnings.catch_warnings():
                # Without ranks, torch warns that it assumes what is meant.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
    except CheckpointException as error:
        raise _translate(what, error) from None


def _translate(what: str, error: CheckpointException) -> CheckpointError:
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    # Damage comes last: what else went wrong would go wrong with an older checkpoint, too.
    for kind in (CheckpointError, DamagedCheckpointError):
        for rank, failure in failures.items():
            if type(failure) is kind:
                return kind(f"{what}: rank {rank}: {failure}")
    rank, failure = next(iter(failures.items()))
    if isinstance(failure, PacelineError):
        return CheckpointError(f"{what}: rank {rank}: {failure}")
    return CheckpointError(
        f"{what}: rank {rank}: {type(failure).__name__}: {failure}; is it a checkpoint of another "
        "model or optimizer?"
        if isinstance(failure, (RuntimeError, ValueError, KeyError))
        else f"{what}: rank {rank}: {type(failure).__name__}: {failure}"
    )
