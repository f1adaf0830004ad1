"""Translates torch's checkpoint failures into Paceline's errors, the same on all ranks.

torch gathers the failures of all ranks, and raises them on every rank as a `CheckpointException`.
That is not an `Exception`, so ``except Exception`` does not catch it.
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
    """Raises a `CheckpointError` for anything that failed inside on any rank.

    Args:
        what: The operation and its checkpoint.
    """
    try:
        if dist.is_initialized():
            yield
        else:
            with warnings.catch_warnings():
                # Without a process group, torch warns that it assumes a single process.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
    except CheckpointException as error:
        raise _translate(what, error) from None


def _translate(what: str, error: CheckpointException) -> CheckpointError:
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    # Damage comes last: other failures would also occur with an older checkpoint.
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
