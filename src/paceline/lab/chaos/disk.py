"""A separate small disk for a run, which can be filled and freed."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from paceline.core.errors import UsageError
from paceline.lab.network import LabError

_FILLER = ".chaos-filler"


@contextlib.contextmanager
def small_disk(directory: pathlib.Path, size_bytes: int) -> Iterator[None]:
    """Mounts a tmpfs at an empty directory; its contents are kept in the directory on exit."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty; --disk-full needs the directory of a new run")
    if os.geteuid() != 0:
        raise LabError("--disk-full mounts a tmpfs, which needs root")
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "paceline-chaos", str(directory))
    try:
        yield
    finally:
        free(directory)
        with tempfile.TemporaryDirectory(dir=directory.parent) as beside:
            kept = pathlib.Path(beside) / "kept"
            shutil.copytree(directory, kept)
            _run("umount", "--lazy", str(directory))
            for entry in kept.iterdir():
                entry.rename(directory / entry.name)


def fill(directory: pathlib.Path) -> int:
    """Fills all free space on the disk; returns the number of bytes taken."""
    taken = 0
    with (directory / _FILLER).open("wb", buffering=0) as file:
        # Repeat, because the run may free space in the meantime.
        for _ in range(10):
            room = shutil.disk_usage(directory).free
            if room == 0:
                break
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), taken, room)
                taken += room
    return taken


def free(directory: pathlib.Path) -> None:
    """Releases the space taken by `fill`."""
    (directory / _FILLER).unlink(missing_ok=True)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if result.returncode != 0:
        raise LabError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
