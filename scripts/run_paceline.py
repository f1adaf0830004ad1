"""Runs a Paceline command, directly or on the hosts of the lab."""

import subprocess
import sys


def run_paceline(launcher: list[str], *arguments: str) -> None:
    """Runs a command that must succeed, and discards its standard output.

    Args:
        launcher: Empty, or a command such as ``lab run ... --`` that starts the ranks.
        arguments: The command and its arguments.
    """
    paceline = [sys.executable, "-m", "paceline"]
    command = [*paceline, *launcher, *paceline] if launcher else paceline
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
