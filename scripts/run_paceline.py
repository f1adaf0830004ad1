"""Starts a command of Paceline, by itself or on the hosts of the lab."""

import subprocess
import sys


def run_paceline(launcher: list[str], *arguments: str) -> None:
    """Runs a command that must succeed, without what it prints.

    Args:
        launcher: Empty, or a command such as ``lab run ... --`` that starts the ranks.
        arguments: The command.
    """
    paceline = [sys.executable, "-m", "paceline"]
    command = [*paceline, *launcher, *paceline] if launcher else paceline
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
