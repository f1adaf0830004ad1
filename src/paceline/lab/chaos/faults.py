"""Injects each kind of fault into a run, and reverts it."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from paceline.core.units import MB
from paceline.lab.chaos.config import ChaosConfig
from paceline.lab.chaos.damage import damage_newest
from paceline.lab.chaos.disk import fill, free
from paceline.lab.chaos.processes import marked_processes, ranks_of, send
from paceline.lab.chaos.schedule import Fault
from paceline.lab.network import INTERFACE, Host
from paceline.lab.shaping import LinkShape

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
