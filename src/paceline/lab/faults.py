"""The faults that chaos can inject into a run, how each is reverted, and when each is due.

`FAULTS` lists them by name. To add one, write a context manager that injects the fault, yields a
description of its target and reverts the fault, and add it to `FAULTS`. `paceline lab chaos` offers
it as soon as it has an option of the same name: a duration, or a flag. The times and targets of all
faults of a run are drawn from a seed before it starts.
"""

import contextlib
import dataclasses
import heapq
import os
import pathlib
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

from paceline.checkpoint.storage import parse_step
from paceline.core.errors import UsageError
from paceline.core.units import MB
from paceline.lab.network import INTERFACE, LabError, LinkShape, Site, run_command
from paceline.lab.run import hosts_of, marked_processes, ranks_of, send
from paceline.training.run_directory import CHECKPOINTS

_FEWEST_CHECKPOINTS = 2
"""The damaged one, and one to fall back on."""
_FILLER = ".chaos-filler"
# Periods vary between half and one and a half times, so that faults do not synchronise with steps.
_JITTER = 0.5
_SLOW = LinkShape(rate_bits_per_s=50e6)
_LOSS = ("-i", INTERFACE, "-m", "statistic", "--mode", "random", "--probability", "0.02")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A scheduled fault."""

    number: int
    """Number from 1, in chronological order."""
    kind: str
    """Name in `FAULTS`."""
    due_s: float
    """Seconds since the start."""
    lasts_s: float
    choice: float
    """Number in [0, 1) that selects among the targets available at that time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetRun:
    """The run that faults act on: on its processes, hosts and directory, and on nothing else."""

    directory: pathlib.Path
    mark: str
    """The value that identifies its processes."""
    sites: Sequence[Site]
    """The lab's sites that it runs on, if any."""
    any_process: bool
    """Whether launchers and helper processes are targets, not only ranks."""

    def processes(self, site: int | None = None) -> list[int]:
        """Returns the processes that are targets, on all sites or on one."""
        return (marked_processes if self.any_process else ranks_of)(self.mark, site)


Inject = Callable[[TargetRun, Fault], contextlib.AbstractContextManager[str | None]]
"""Injects a fault, yields a description of its target, and reverts it; None without a target."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultType:
    """A kind of fault."""

    inject: Inject
    lasts_s: float = 0.0
    """Duration if none is requested."""
    needs_links: bool = False
    """Whether the fault acts on a link between hosts of the lab."""
    needs_sites: bool = False
    """Whether the fault acts on one of several sites of the lab."""


@contextlib.contextmanager
def _kill(run: TargetRun, fault: Fault) -> Iterator[str | None]:
    signalled = _signal_process(run, fault, signal.SIGKILL)
    yield signalled[1] if signalled else None


@contextlib.contextmanager
def _stop(run: TargetRun, fault: Fault) -> Iterator[str | None]:
    signalled = _signal_process(run, fault, signal.SIGSTOP)
    if signalled is None:
        yield None
        return
    pid, target = signalled
    try:
        yield target
    finally:
        send(pid, signal.SIGCONT, run.mark)


@contextlib.contextmanager
def _corrupt(run: TargetRun, fault: Fault) -> Iterator[str | None]:
    damage = damage_newest(run.directory, fault.choice)
    # A checkpoint is read only when a run resumes, so a rank is killed as well.
    is_injected = damage is not None and _signal_process(run, fault, signal.SIGKILL)
    yield damage if is_injected else None


@contextlib.contextmanager
def _fill_disk(run: TargetRun, _fault: Fault) -> Iterator[str | None]:
    taken = fill(run.directory)
    try:
        yield f"{taken / MB:.0f} MB taken"
    finally:
        free(run.directory)


def _disturb_link(begin: Sequence[str], end: Sequence[str]) -> FaultType:
    """Returns the fault that runs one command on a host, and afterwards another."""

    @contextlib.contextmanager
    def inject(run: TargetRun, fault: Fault) -> Iterator[str | None]:
        hosts = hosts_of(run.sites)
        host = hosts[int(fault.choice * len(hosts))]
        host.run(*begin)
        try:
            yield f"host {host.index}"
        finally:
            host.run(*end)

    return FaultType(inject=inject, needs_links=True)


@contextlib.contextmanager
def _cut_uplink(run: TargetRun, fault: Fault) -> Iterator[str | None]:
    site = run.sites[int(fault.choice * len(run.sites))]
    site.set_uplink(is_up=False)
    try:
        yield f"site {site.index}"
    finally:
        site.set_uplink(is_up=True)


@contextlib.contextmanager
def _kill_site(run: TargetRun, fault: Fault) -> Iterator[str | None]:
    site = int(fault.choice * len(run.sites))
    killed = [pid for pid in run.processes(site) if send(pid, signal.SIGKILL, run.mark)]
    yield f"site {site}, {len(killed)} processes" if killed else None


FAULTS: dict[str, FaultType] = {
    "kill": FaultType(inject=_kill),
    "stop": FaultType(inject=_stop),
    "link-down": _disturb_link(
        ("ip", "link", "set", INTERFACE, "down"), ("ip", "link", "set", INTERFACE, "up")
    ),
    "link-slow": _disturb_link(
        ("tc", "qdisc", "add", "dev", INTERFACE, "root", *_SLOW.bucket_arguments),
        ("tc", "qdisc", "del", "dev", INTERFACE, "root"),
    ),
    "link-loss": _disturb_link(
        ("iptables", "-A", "INPUT", *_LOSS, "-j", "DROP"),
        ("iptables", "-D", "INPUT", *_LOSS, "-j", "DROP"),
    ),
    "site-down": FaultType(inject=_cut_uplink, needs_sites=True),
    "site-kill": FaultType(inject=_kill_site, needs_sites=True),
    "disk-full": FaultType(inject=_fill_disk, lasts_s=5.0),
    "corrupt": FaultType(inject=_corrupt),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Period and duration of one kind of fault."""

    every_s: float
    lasts_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.every_s > 0 or self.lasts_s < 0:
            raise UsageError("a fault needs a positive period and no negative duration")


def schedule(kinds: Mapping[str, Kind], *, seed: int, for_s: float) -> Iterator[Fault]:
    """Yields the faults of the first `for_s` seconds in chronological order."""
    # Each kind has its own random stream, so that omitting one does not change the others.
    streams = [
        _stream(kind, settings, random.Random(f"{seed} {kind}"), for_s)
        for kind, settings in kinds.items()
    ]
    merged = heapq.merge(*streams, key=lambda fault: fault.due_s)
    for number, fault in enumerate(merged, start=1):
        yield dataclasses.replace(fault, number=number)


def _stream(kind: str, settings: Kind, chance: random.Random, for_s: float) -> Iterator[Fault]:
    due_s = 0.0
    while True:
        due_s += settings.every_s * chance.uniform(1 - _JITTER, 1 + _JITTER)
        if due_s >= for_s:
            return
        yield Fault(
            number=0, kind=kind, due_s=due_s, lasts_s=settings.lasts_s, choice=chance.random()
        )


def _signal_process(run: TargetRun, fault: Fault, number: signal.Signals) -> tuple[int, str] | None:
    """Signals one process; returns its pid and a description, or None if there was none."""
    targets = run.processes()
    index = int(fault.choice * len(targets))
    if not targets or not send(targets[index], number, run.mark):
        return None
    return targets[index], f"process {index + 1} of {len(targets)}"


def damage_newest(run: pathlib.Path, choice: float) -> str | None:
    """Flips a bit or cuts off the end of one file of the newest checkpoint; describes the damage.

    Does nothing and returns None if there is no other checkpoint to fall back on.
    """
    steps = {
        step: path
        for path in (run / CHECKPOINTS).glob("*")
        if (step := parse_step(path.name)) is not None
    }
    if len(steps) < _FEWEST_CHECKPOINTS:
        return None
    newest = steps[max(steps)]
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        return None
    chance = random.Random(choice)
    file = chance.choice(files)
    offset = chance.randrange(file.stat().st_size)
    name = file.relative_to(run)
    if chance.random() < 0.5:
        os.truncate(file, offset)
        return f"{name} cut to {offset:,} bytes"
    with file.open("r+b") as content:
        content.seek(offset)
        byte = content.read(1)[0]
        content.seek(offset)
        content.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return f"{name}, one bit of byte {offset:,} flipped"


@contextlib.contextmanager
def small_disk(directory: pathlib.Path, size_bytes: int) -> Iterator[None]:
    """Mounts a tmpfs at an empty directory; its contents are kept in the directory on exit."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty; --disk-full needs the directory of a new run")
    if os.geteuid() != 0:
        raise LabError("--disk-full mounts a tmpfs, which needs root")
    options = ["-t", "tmpfs", "-o", f"size={size_bytes}"]
    run_command(["mount", *options, "paceline-chaos", str(directory)])
    try:
        yield
    finally:
        free(directory)
        with tempfile.TemporaryDirectory(dir=directory.parent) as beside:
            kept = pathlib.Path(beside) / "kept"
            shutil.copytree(directory, kept)
            run_command(["umount", "--lazy", str(directory)])
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
