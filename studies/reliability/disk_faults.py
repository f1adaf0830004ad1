"""Injects a disk error at every system call of a checkpoint save.

Every disk-related system call of saving a checkpoint and removing the previous one fails in turn,
once with each error that disks and network file systems return. strace replaces the call's result
in the saving process, so that Python, the libraries and the kernel state are real. After each
fault, these conditions must hold:

- the save has failed and its message names the cause, or the checkpoint exists and is intact;
- the previous checkpoint exists and is intact, unless the new one is;
- the next save succeeds.

Any other result counts as lost. Requires root and strace. Appends one `fault` record per system
call and error to the store.

    python -m studies.reliability.disk_faults results/disk-faults.jsonl
"""

import errno
import mmap
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

from paceline.checkpoint.catalog import verify_checkpoint
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.storage import open_checkpoints
from studies.harness.records import FaultRecords
from studies.harness.study import study_parser

CALLS = (
    *("mkdir", "openat", "write", "fsync", "rename", "flock"),
    *("newfstatat", "getdents64", "unlinkat", "rmdir"),
)
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "ESTALE": errno.ESTALE}
_MESSAGE_BYTES = 4096
_MOST_CALLS = 200
"""Limit on the calls of one kind that are made to fail."""
_PATIENCE_S = 60.0

SAVED, REFUSED, CRASHED = 0, 3, 4
"""Exit codes of the saving process."""


def state() -> dict[str, torch.Tensor]:
    """Returns the state to save: a few tensors, each saved in its own file."""
    torch.manual_seed(0)
    return dict(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).state_dict())


def save(place: pathlib.Path, step: int) -> None:
    """Saves a checkpoint of a step."""
    with Checkpointer(place, keep=1, asynchronous=False, max_file_bytes=1) as checkpointer:
        checkpointer.save(step, state(), {"step": step})


def save_in_child(
    place: pathlib.Path, step: int, attach: Callable[[int], "subprocess.Popen[bytes]"]
) -> tuple[int, str]:
    """Saves in a separate process, and returns its exit code and message.

    The message is passed in shared memory, because a pipe needs system calls, which may fail too.
    """
    said, gate = mmap.mmap(-1, _MESSAGE_BYTES), mmap.mmap(-1, 1)
    child = os.fork()
    if child == 0:
        code = CRASHED
        try:
            while not gate[0]:
                time.sleep(0.001)
            save(place, step)
            code = SAVED
        except CheckpointError as error:
            message = str(error).encode()[:_MESSAGE_BYTES]
            said[: len(message)] = message
            code = REFUSED
        except BaseException as error:  # The parent counts any such error as lost.
            message = f"{type(error).__name__}: {error}".encode()[:_MESSAGE_BYTES]
            said[: len(message)] = message
        finally:
            os._exit(code)
    tracer = attach(child)
    gate[0] = 1
    deadline = time.monotonic() + _PATIENCE_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.001)
    tracer.wait(_PATIENCE_S)
    return os.waitstatus_to_exitcode(ended[1]), said[:].rstrip(b"\0").decode()


def tracer_of(
    log: pathlib.Path, call: str, name: str, number: int
) -> Callable[[int], "subprocess.Popen[bytes]"]:
    """Returns a function that attaches strace to a process and fails its `number`-th `call`."""

    def attach(child: int) -> "subprocess.Popen[bytes]":
        log.unlink(missing_ok=True)
        inject = f"inject={call}:error={name}:when={number}"
        tracer = subprocess.Popen(
            ["strace", "-f", "-o", log, "-e", f"trace={call}", "-e", inject, "-p", str(child)],
            stderr=subprocess.DEVNULL,
        )
        status = pathlib.Path(f"/proc/{child}/status")
        deadline = time.monotonic() + _PATIENCE_S
        while f"TracerPid:\t{tracer.pid}\n" not in status.read_text():
            if tracer.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("strace cannot attach to a process of this program")
            time.sleep(0.001)
        return tracer

    return attach


def is_intact(place: pathlib.Path, step: int) -> bool:
    """Returns whether the checkpoint of a step exists and every byte of it is intact."""
    return step in open_checkpoints(place).steps() and not list(verify_checkpoint(place, step))


def try_fault(directory: pathlib.Path, call: str, name: str, number: int) -> str | None:
    """Returns the problem after one fault: "" if none; None if there was no such call."""
    place, log = directory / "checkpoints", directory / "strace.log"
    save(place, 1)
    code, message = save_in_child(place, 2, tracer_of(log, call, name, number))
    if "(INJECTED)" not in log.read_text():
        return None
    where = f"{call} {number} {name}: "
    if not (is_intact(place, 1) or is_intact(place, 2)):
        return f"{where}no checkpoint is intact"
    if code == SAVED and not is_intact(place, 2):
        return f"{where}said to be saved, and is not intact"
    if code == REFUSED and os.strerror(ERRORS[name]) not in message:
        return f"{where}the message does not name the cause: {message}"
    if code not in (SAVED, REFUSED):
        return f"{where}ended with {code}: {message}"
    if code == REFUSED and 2 in open_checkpoints(place).steps() and not is_intact(place, 2):
        return f"{where}left a checkpoint that is not intact"
    save(place, 3)
    return "" if is_intact(place, 3) else f"{where}the next save is not intact"


def main() -> int:
    """Fails every call with every error, and prints and records the results."""
    parser = study_parser(__doc__)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=CALLS)
    parser.add_argument("--errors", nargs="+", choices=ERRORS, default=list(ERRORS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        save(pathlib.Path(directory), 1)  # Imports everything that saving needs.
    records = FaultRecords(arguments.store)
    for call in arguments.calls:
        for name in arguments.errors:
            outcomes: list[str] = []
            for number in range(1, _MOST_CALLS):
                with tempfile.TemporaryDirectory() as directory:
                    outcome = try_fault(pathlib.Path(directory), call, name, number)
                if outcome is None:
                    break
                outcomes.append(outcome)
            lost = [outcome for outcome in outcomes if outcome]
            records.add("checkpoint writer", f"{name} in {call}", len(outcomes), lost)
    return records.exit_code


if __name__ == "__main__":
    sys.exit(main())
