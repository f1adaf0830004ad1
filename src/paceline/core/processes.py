"""Processes that do not outlive their reason to exist."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when `parent_pid`, its parent, ends.

    A killed parent cannot clean up, and a worker that waits in a collective would wait
    for ever. Linux only: elsewhere nothing happens, and daemonic workers still end with a
    parent that exits in an orderly way.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have gone before the request was made; then nobody will send the signal.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
