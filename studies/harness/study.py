"""What every study shares: its command line, processes of its own, and Paceline as a command."""

import argparse
import concurrent.futures
import multiprocessing
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from paceline.core.processes import start_child

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

ROOT = pathlib.Path(__file__).parents[2]
PACELINE = (sys.executable, "-m", "paceline")


def study_parser(text: str | None, store: str | None = "store") -> argparse.ArgumentParser:
    """Returns a study's command line.

    Args:
        text: The docstring of the program.
        store: Name of the argument for the file of records; None for programs that have none.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if store is not None:
        help = "file that the records are appended to"
        parser.add_argument(store, type=pathlib.Path, help=help)
    return parser


def in_fresh_process(
    function: Callable[_Arguments, _Result],
    *arguments: _Arguments.args,
    **options: _Arguments.kwargs,
) -> _Result:
    """Runs a function in a new process, because peak memory is per process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments, **options).result()


def resident_peak_bytes() -> float:
    """Returns the peak resident memory of this process."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return float(status.partition("VmHWM:")[2].split()[0]) * 1024


def run_paceline(*arguments: str, launcher: Sequence[str] = ()) -> None:
    """Runs a Paceline command that must succeed, and discards its standard output.

    Args:
        arguments: The command and its arguments.
        launcher: Empty, or a command such as ``lab run ... --`` that starts the ranks.
    """
    command = [*PACELINE, *launcher, *PACELINE] if launcher else [*PACELINE]
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)


def start_paceline(*arguments: str, log: pathlib.Path) -> "subprocess.Popen[bytes]":
    """Starts a Paceline command, which appends everything that it prints to `log`."""
    return start_child([*PACELINE, *arguments], log=log)
