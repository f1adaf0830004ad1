"""Injects each kind of fault into a run, and reverts it.

Damages the newest checkpoint of a run: flips a bit or truncates a file.

A separate small disk for a run, which can be filled and freed.
"""

import contextlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from paceline.checkpoint.storage import parse_step
from paceline.core.errors import UsageError
from paceline.core.units import MB
from paceline.lab.chaos.config import ChaosConfig, Fault
from paceline.lab.chaos.processes import marked_processes, ranks_of, send
from paceline.lab.network import INTERFACE, Host, LabError, LinkShape
from paceline.training.run_files import CHECKPOINTS

_FEWEST = 2
"""Minimum number of checkpoints: the damaged one, and one to fall back on."""


def damage_newest(run: pathlib.Path, choice: float) -> str | None:
    """Damages one file of the newest checkpoint; returns a description of the damage.

    Does nothing and returns None if there is no other checkpoint to fall back on.
    """
    steps = {
        step: path
        for path in (run / CHECKPOINTS).glob("*")
        if (step := parse_step(path.name)) is not None
    }
    if len(steps) < _FEWEST:
        return None
    newest = steps[max(steps)]
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        return None
    chance = random.Random(choice)
    file = chance.choice(files)
    place = chance.randrange(file.stat().st_size)
    name = file.relative_to(run)
    if chance.random() < 0.5:
        os.truncate(file, place)
        return f"{name} cut to {place:,} bytes"
    with file.open("r+b") as content:
        content.seek(place)
        byte = content.read(1)[0]
        content.seek(place)
        content.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return f"{name}, one bit of byte {place:,} flipped"


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


_SLOW = LinkShape(rate_bits_per_s=50e6)
_LOSS = ("-i", INTERFACE, "-m", "statistic", "--mode", "random", "--probability", "0.02")


class Faults:
    """Acts only on the processes, hosts and directory of one run.

    Args:
        config: The configuration of the chaos run.
        mark: The value that identifies the run's processes.
        hosts: The lab's hosts that it runs on, if any.
    """

    def __init__(self, config: ChaosConfig, mark: str, hosts: Sequence[Host]) -> None:
        self._config = config
        self._mark = mark
        self._hosts = list(hosts)

    @contextlib.contextmanager
    def inflict(self, fault: Fault) -> Iterator[str | None]:
        """Injects a fault, yields its target, and reverts it; yields None without a target."""
        if fault.kind in ("kill", "stop", "corrupt"):
            yield self._signal(fault)
        elif fault.kind == "disk-full":
            taken = fill(self._config.run)
            try:
                yield f"{taken / MB:.0f} MB taken"
            finally:
                free(self._config.run)
        else:
            host = self._hosts[int(fault.choice * len(self._hosts))]
            undo = self._disturb(fault, host)
            try:
                yield f"host {host.index}"
            finally:
                undo()

    def _signal(self, fault: Fault) -> str | None:
        """Signals a process; a stopped process is continued after the fault's duration."""
        damaged = None
        if fault.kind == "corrupt":
            # A checkpoint is read only when a run resumes, so a rank is killed as well.
            damaged = damage_newest(self._config.run, fault.choice)
            if damaged is None:
                return None
        targets = (marked_processes if self._config.any_process else ranks_of)(self._mark)
        if not targets:
            return None
        index = int(fault.choice * len(targets))
        pid = targets[index]
        number = signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL
        if not send(pid, number, self._mark):
            return None
        if fault.kind == "stop":
            time.sleep(fault.lasts_s)
            send(pid, signal.SIGCONT, self._mark)
        return damaged or f"process {index + 1} of {len(targets)}"

    def _disturb(self, fault: Fault, host: Host) -> Callable[[], object]:
        """Disturbs a host's link; returns a function that restores it."""
        if fault.kind == "link-down":
            host.run("ip", "link", "set", INTERFACE, "down")
            return lambda: host.run("ip", "link", "set", INTERFACE, "up")
        if fault.kind == "link-slow":
            host.run("tc", "qdisc", "add", "dev", INTERFACE, "root", *_SLOW.bucket_arguments)
            return lambda: host.run("tc", "qdisc", "del", "dev", INTERFACE, "root")
        host.run("iptables", "-A", "INPUT", *_LOSS, "-j", "DROP")
        return lambda: host.run("iptables", "-D", "INPUT", *_LOSS, "-j", "DROP")
