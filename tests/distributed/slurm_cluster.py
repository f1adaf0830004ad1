"""Helpers for tests on a local Slurm cluster: client commands and the loss of a node."""

import contextlib
import os
import pathlib
import signal
import subprocess

from tests.processes import children_of


def slurm_client(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def lose_node(cluster: pathlib.Path, node: str, job: str) -> None:
    """Kills a node's slurmd and the steps of a job on it, like a power failure."""
    doomed = [int((cluster / "run" / f"slurmd-{node}.pid").read_text())]
    steps = [
        int(path.name)
        for path in pathlib.Path("/proc").glob("[0-9]*")
        if _is_step(path, cluster, job)
    ]
    while steps:
        pid = steps.pop()
        doomed.append(pid)
        steps += children_of(pid)
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_step(process: pathlib.Path, cluster: pathlib.Path, job: str) -> bool:
    with contextlib.suppress(OSError):
        command = (process / "cmdline").read_bytes()
        # Another cluster on this machine may have a job with the same number.
        environment = (process / "environ").read_bytes().split(b"\0")
        return (
            command.startswith(f"slurmstepd: [{job}.".encode())
            and f"SLURM_CONF={cluster}/slurm.conf".encode() in environment
        )
    return False
