"""Tests that the README matches the output of its commands and its records."""

import io
import pathlib
import re
import shlex

import pytest
from rich.console import Console

from paceline.loop.demo import read_outcome
from paceline.reports.tables.predictions import outcome_table
from tests.processes import paceline

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
LEFT_OUT = "..."


def _sessions() -> dict[str, list[str]]:
    """Returns the output that the README shows for each command."""
    found: dict[str, list[str]] = {}
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL):
        command = ""
        for line in block.splitlines():
            if line.startswith("$ "):
                command = line.removeprefix("$ ")
                found[command] = []
            elif line.strip() not in ("", LEFT_OUT):
                found[command].append(line)
    return found


SESSIONS = _sessions()
PRINTED_ANYWHERE = [command for command in SESSIONS if command != "paceline demo"]


def _words(text: str) -> str:
    return " ".join(text.split())


def test_it_is_short_and_has_five_commands() -> None:
    assert len(TEXT.splitlines()) <= 150
    assert len(SESSIONS) == 5
    assert all(SESSIONS.values())


@pytest.mark.parametrize("command", PRINTED_ANYWHERE)
def test_what_is_shown_of_a_command_is_what_it_prints(command: str, tmp_path: pathlib.Path) -> None:
    arguments = shlex.split(command)[1:]
    printed = _words(paceline(tmp_path, *arguments).stdout)
    for line in SESSIONS[command]:
        for part in line.split(LEFT_OUT):
            assert _words(part) in printed


def test_what_is_shown_of_the_demonstration_is_what_its_record_says() -> None:
    step = read_outcome(ROOT / "results" / "demo").step
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        console.print(outcome_table([step], ""))
    rows = [_words(line) for line in captured.get().splitlines()]
    shown = [_words(line) for line in SESSIONS["paceline demo"]]
    assert set(shown[:2]) <= set(rows)
