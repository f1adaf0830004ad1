"""A place for the ranks of one machine to meet, which goes with the process that made it."""

import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def rendezvous_path() -> Iterator[str]:
    """Yields the path of an empty file for a `FileStore`.

    On Linux the file is in memory and its path leads through this process, so that nothing is
    left on the disk even when this process is killed; only processes of the same user can open
    it. Elsewhere it is in a private temporary directory.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create("paceline-rendezvous")
        try:
            yield f"/proc/{os.getpid()}/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as directory:
            yield str(pathlib.Path(directory) / "rendezvous")
