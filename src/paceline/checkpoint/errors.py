"""Checkpoint errors, each with the file and the remedy."""

import errno
import os

from paceline.core.errors import DISK_FULL, PacelineError

_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
REMEDY = "load an older checkpoint, or restore the file from a backup"
"""Remedy for a missing or damaged file."""


class CheckpointError(PacelineError):
    """Raised when a checkpoint cannot be saved, found or loaded; names the file."""


class DamagedCheckpointError(CheckpointError):
    """Raised when a checkpoint differs from what was saved; an older one may be intact."""


def cannot_write(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """Returns the error for a checkpoint file that cannot be written."""
    if error.errno in DISK_FULL:
        remedy = "free disk space or name another place"
    elif error.errno in _FORBIDDEN:
        remedy = "name a place that can be written to"
    elif error.errno == errno.EIO:
        remedy = "the disk is failing; name a place on another disk"
    else:
        remedy = "check the place, or name another one"
    return CheckpointError(
        f"{os.fspath(path)}: {error.strerror or error}, so this checkpoint was not saved; "
        f"{remedy}; earlier checkpoints are not affected"
    )


def cannot_move(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """Returns the error for a checkpoint that cannot be removed or renamed."""
    return CheckpointError(
        f"{os.fspath(path)}: {error.strerror or error}, so it cannot be removed or renamed; do so "
        "by hand, or give this process the permission"
    )


def cannot_list(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """Returns the error for a directory whose checkpoints cannot be listed."""
    return CheckpointError(
        f"{os.fspath(path)}: {error.strerror or error}, so its checkpoints cannot be listed; "
        "check the disk, or name another place"
    )


def cannot_read(path: str | os.PathLike[str], error: OSError) -> DamagedCheckpointError:
    """Returns the error for a checkpoint file that cannot be read."""
    return DamagedCheckpointError(f"{os.fspath(path)}: {error.strerror or error}; {REMEDY}")
