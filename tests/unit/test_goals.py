"""Tests of ``paceline`` alone, which lists commands by goal, and of unknown commands."""

import shlex

import pytest

from paceline.cli.main import goals_text, main, parse
from paceline.core.errors import UsageError


def test_every_goal_has_a_command_that_parses() -> None:
    commands = [
        line.strip() for line in goals_text().splitlines() if line.startswith("      paceline ")
    ]
    assert len(commands) >= 10
    for command in commands:
        words = shlex.split(command.partition(" > ")[0])[1:]
        parse(words)


def test_it_fits_80_columns_and_is_printed_without_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown == goals_text()
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("trian run.toml", "paceline: no command 'trian'; did you mean 'train'? "),
        ("bench stp --model small", "paceline bench: no command 'stp'; did you mean 'step'? "),
        ("plan xyz", "paceline plan: no command 'xyz'; known: account, "),
    ],
)
def test_a_command_that_does_not_exist_gets_the_nearest_one(typed: str, words: str) -> None:
    with pytest.raises(UsageError, match="no command") as caught:
        parse(shlex.split(typed))
    assert str(caught.value).startswith(words)
