"""Executes a command inside a host: ``python -m paceline.lab.rank PARENT_PID COMMAND ...``.

Entering a user namespace clears the parent-death signal, so it is set here, after entering the
namespace and before the command replaces this process.
"""

import os
import sys
from collections.abc import Sequence

from paceline.core.processes import die_with_parent
from paceline.lab.network import Host


def rank_command(host: Host, command: Sequence[str]) -> list[str]:
    """Returns the command line that runs a command on a host and dies with this process."""
    return [*host.prefix, sys.executable, "-m", "paceline.lab.rank", str(os.getpid()), *command]


def main() -> None:
    """Replaces this process with the command."""
    parent_pid, *command = sys.argv[1:]
    die_with_parent(int(parent_pid))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
