"""Runs a command once per rank on the hosts of the lab.

Rank 0's standard output passes through unchanged, so that it can be piped. All other output goes to
standard error, with the host and rank in front of each line. The first rank that fails ends the
others and determines the exit code.

`Command` also finds all processes of a command and no others, as chaos needs: it is started with a
unique environment variable, which all of its descendants inherit. A process can therefore be
identified even after its parents have exited. A process without the variable is never touched.
"""

import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from paceline.core.host import threads_per_rank
from paceline.core.processes import exit_code_of, start_child, termination_as_exit, wait_for_group
from paceline.lab.bandwidth import measure_link
from paceline.lab.network import INTERFACE, Host, LinkShape, Site, sites
from paceline.records.kinds import (
    LINK_DELAY,
    LINK_LOSS,
    LINK_RATE,
    MEASURED_LINK_RATE,
    MEASURED_SITE_RATE,
    NUM_SITES,
    SITE_DELAY,
    SITE_LOSS,
    SITE_RATE,
)
from paceline.records.links import link_variables

SITE = "PACELINE_SITE"
"""Set where there are several sites: the index of the site of a process, from 0."""

# A host's namespace contains nothing else, so any port is free.
_MASTER_PORT = 15_000

_GRACE_S = 60.0
"""Time for ranks to save their state when asked to stop; a second request cuts it short."""


def run_in_lab(
    command: Sequence[str],
    *,
    num_sites: int = 1,
    hosts_per_site: int,
    ranks_per_host: int,
    link: LinkShape,
    uplink: LinkShape | None = None,
) -> int:
    """Creates hosts, measures their links, runs the command on them, and cleans up."""
    with termination_as_exit(), sites(num_sites, hosts_per_site, link, uplink) as made:
        environment = link_variables(_describe_links(made, link, uplink or LinkShape()))
        return run_on_hosts(command, hosts_of(made), ranks_per_host, environment)


def hosts_of(made: Sequence[Site]) -> list[Host]:
    """Returns the hosts of all sites, site by site."""
    return [host for site in made for host in site.hosts]


def _describe_links(
    made: Sequence[Site], link: LinkShape, uplink: LinkShape
) -> dict[str, float | None]:
    """Measures the links and returns their case fields.

    A single host has a link too, but no traffic crosses it.
    """
    first, fields = made[0].hosts, dict[str, float | None]()
    if len(hosts_of(made)) > 1:
        fields |= {
            LINK_RATE: link.rate_bits_per_s,
            LINK_LOSS: link.loss or None,
            LINK_DELAY: link.delay_s or None,
        }
    if len(first) > 1:
        measured = measure_link(first[1], first[0], link.rate_bits_per_s, link.delay_s)
        _say(f"measured link bandwidth {measured / 1e6:.0f} Mbit/s")
        fields[MEASURED_LINK_RATE] = round(measured)
    if len(made) > 1:
        rates = [rate for rate in (link.rate_bits_per_s, uplink.rate_bits_per_s) if rate]
        measured = measure_link(
            made[1].hosts[0], first[0], min(rates, default=None), link.delay_s + uplink.delay_s
        )
        _say(f"measured bandwidth between sites {measured / 1e6:.0f} Mbit/s")
        fields |= {
            SITE_RATE: uplink.rate_bits_per_s,
            SITE_LOSS: uplink.loss or None,
            SITE_DELAY: uplink.delay_s or None,
            MEASURED_SITE_RATE: round(measured),
        }
    return fields


def _say(text: str) -> None:
    sys.stderr.write(f"paceline lab: {text}\n")


def run_on_hosts(
    command: Sequence[str],
    made: Sequence[Host],
    ranks_per_host: int,
    environment: Mapping[str, str],
) -> int:
    """Runs the command once per rank and returns the exit code of the group."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    pumps: list[threading.Thread] = []
    for rank in range(len(made) * ranks_per_host):
        host = made[rank // ranks_per_host]
        process = subprocess.Popen(
            host.command(command),
            env={**os.environ, **rank_environment(made, rank, ranks_per_host), **environment},
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        place = f"site {host.site} " if made[-1].site else ""
        name = f"{place}host {host.index} rank {rank}"
        processes[name] = process
        pumps += [_pump(stream, name) for stream in (process.stdout, process.stderr) if stream]
    exit_code, culprit = wait_for_group(processes, grace_s=_GRACE_S)
    for pump in pumps:
        pump.join(timeout=5)
    if culprit is not None:
        _say(f"{culprit} failed with exit code {exit_code}")
    return exit_code


def rank_environment(made: Sequence[Host], rank: int, ranks_per_host: int) -> dict[str, str]:
    """Returns the environment variables that define a rank and its process group."""
    world_size = len(made) * ranks_per_host
    host, num_sites = made[rank // ranks_per_host], made[-1].site + 1
    site = {SITE: str(host.site), **link_variables({NUM_SITES: num_sites})} if num_sites > 1 else {}
    return {
        **site,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GROUP_RANK": str(host.index),
        "MASTER_ADDR": made[0].address,
        "MASTER_PORT": str(_MASTER_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        # torch warns on every connection that these addresses have no host names.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(world_size))),
    }


def _pump(stream: IO[bytes], name: str) -> threading.Thread:
    def copy() -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            # Keep draining if stderr is closed, so that ranks never block on a full pipe.
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{name} | {text}\n")
        stream.close()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


MARK = "PACELINE_CHAOS"
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_GROUP_ENDS_S = 15.0
"""Time for the other ranks to end after a rank on another host has failed."""


class Command:
    """A command and its processes, identified by `mark`: one here, or one per host of the lab."""

    def __init__(self, words: Sequence[str], mark: str, hosts: Sequence[Host] = ()) -> None:
        self._words = list(words)
        self._mark = mark
        self._hosts = list(hosts)
        self._running: list[subprocess.Popen[bytes]] = []
        self.starts = 0

    def start(self) -> None:
        """Starts the command; its output goes to our own stdout and stderr."""
        self.starts += 1
        environment = {**os.environ, MARK: self._mark}
        if not self._hosts:
            # In a new session Ctrl-C reaches only this process, which then ends the command.
            self._running = [start_child(self._words, env=environment, start_new_session=True)]
            return
        self._running = [
            start_child(
                host.command(self._words),
                env={**environment, **rank_environment(self._hosts, host.index, 1)},
                start_new_session=True,
            )
            for host in self._hosts
        ]

    def exit_code(self) -> int | None:
        """Returns the exit code, or None while running; a failed rank ends its group."""
        codes = [process.poll() for process in self._running]
        failed = [code for code in codes if code]
        if failed:
            if None in codes:
                end_all(self._mark, _GROUP_ENDS_S)
                for process in self._running:
                    process.wait()
            return exit_code_of(failed[0])
        return None if None in codes else 0

    def terminate(self) -> None:
        """Sends SIGTERM to all running processes."""
        for process in self._running:
            if process.poll() is None:
                process.terminate()


def new_mark() -> str:
    """Returns a unique value for `MARK`."""
    return secrets.token_hex(8)


def marked_processes(mark: str, site: int | None = None) -> list[int]:
    """Returns the live processes that carry the mark, all or those of a site, sorted by pid."""
    wanted = {f"{MARK}={mark}".encode()}
    if site is not None:
        wanted.add(f"{SITE}={site}".encode())
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = set((entry / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue
            # A zombie has no environment, so it is not found.
            if wanted <= environment:
                found.append(int(entry.name))
    return sorted(found)


def ranks_of(mark: str, site: int | None = None) -> list[int]:
    """Returns the marked processes that train: those without children, except helpers."""
    marked = marked_processes(mark, site)
    parents = {_parent(pid) for pid in marked}
    leaves = [pid for pid in marked if pid not in parents]
    return [
        pid for pid in leaves if not any(helper in _command(pid) for helper in _HELPERS)
    ] or leaves


def send(pid: int, number: signal.Signals, mark: str) -> bool:
    """Sends a signal to a process that still carries the mark; returns whether it was sent."""
    if pid not in marked_processes(mark):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def end_all(mark: str, within_s: float) -> list[int]:
    """Waits up to `within_s`, kills the remaining processes, and returns those killed."""
    deadline = time.monotonic() + within_s
    left: Sequence[int] = marked_processes(mark)
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = marked_processes(mark)
    orphans = list(left)
    for pid in orphans:
        send(pid, signal.SIGCONT, mark)
        send(pid, signal.SIGKILL, mark)
    return orphans


def _parent(pid: int) -> int | None:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _command(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
