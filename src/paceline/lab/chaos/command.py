"""Starts and restarts the command under test, on this machine or on the lab's hosts."""

import os
import subprocess
from collections.abc import Sequence

from paceline.core.processes import exit_code_of
from paceline.lab.chaos.processes import MARK, end_all
from paceline.lab.network import Host
from paceline.lab.rank import rank_command
from paceline.lab.run import rank_environment

_GROUP_ENDS_S = 15.0
"""Time for the other ranks to end after a rank on another host has failed."""


class Command:
    """A command and its processes: one on this machine, or one per host.

    Args:
        words: The program and its arguments.
        mark: The value that identifies its processes.
        hosts: Hosts of the lab, each with one rank; none to run on this machine.
    """

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
            self._running = [subprocess.Popen(self._words, env=environment, start_new_session=True)]
            return
        self._running = [
            subprocess.Popen(
                rank_command(host, self._words),
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
