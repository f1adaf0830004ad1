"""The command under chaos: started on this machine or on the lab's hosts, and started again."""

import os
import subprocess
from collections.abc import Sequence

from paceline.core.processes import exit_code_of
from paceline.lab.chaos.processes import MARK, end_all
from paceline.lab.network import Host
from paceline.lab.rank import rank_command
from paceline.lab.run import rank_environment

_GROUP_ENDS_S = 15.0
"""How long the others may take once a rank on another host has failed."""


class Command:
    """A command and its processes, once on this machine or once per host.

    Args:
        words: The program and its arguments.
        mark: What tells its processes from all others.
        hosts: Hosts of the lab, each with one rank; none to run on this machine.
    """

    def __init__(self, words: Sequence[str], mark: str, hosts: Sequence[Host] = ()) -> None:
        self._words = list(words)
        self._mark = mark
        self._hosts = list(hosts)
        self._running: list[subprocess.Popen[bytes]] = []
        self.starts = 0

    def start(self) -> None:
        """Starts the command; what it prints goes where ours goes."""
        self.starts += 1
        environment = {**os.environ, MARK: self._mark}
        if not self._hosts:
            # A session of its own: a Ctrl-C is for us, and we end it.
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
        """Returns how the command ended, None while it runs; one that fails ends its group."""
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
        """Asks all of it to end."""
        for process in self._running:
            if process.poll() is None:
                process.terminate()
