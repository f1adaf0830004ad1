"""Tests that every documented command line parses and names existing models.

It checks lines of fenced blocks in any language, and code spans that begin with ``paceline`` in
tables and in the course map's "Run" entries. It does not check commands that running text only
mentions.
"""

import pathlib
import re
import shlex

import pytest

from paceline.accounting.named_model import find_model
from paceline.cli.main import parse
from paceline.core import PacelineError

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))),
    *(ROOT / "course" / "README.md", ROOT / "results" / "README.md"),
]
# These exit before anything is parsed, and the last one writes a file.
_NOT_PARSED = ("--version", "--help", "--tyro-write-completion")
# Placeholders for the reader's own values: capitals, or an ellipsis.
_PLACEHOLDER = re.compile(r"^[A-Z]+$|\.\.\.|…")


def _commands(text: str) -> list[str]:
    """Returns the shell lines of a page's fenced blocks, and the commands of tables and lists."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    found = []
    for language, block in blocks:
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        if language in ("bash", "sh"):
            found += [line for line in lines if not line.startswith("#")]
        else:
            found += [line for line in lines if line.startswith(("$ ", "paceline "))]
    listed = re.findall(r"^(?:\||- \*\*Run:\*\*).*$", text, re.MULTILINE)
    found += [span for line in listed for span in re.findall(r"`(paceline [^`]*)`", line)]
    return [command.removeprefix("$ ") for command in found]


def _invocations(command: str) -> list[list[str]]:
    """Returns the arguments of every `paceline` in a command, including nested ones."""
    command = re.sub(r'^eval "\$\((.*)\)"$', r"\1", command)
    words = shlex.split(command, comments=True)
    for operator in ("|", ">", "&&", "&"):
        words = words[: words.index(operator)] if operator in words else words
    starts = [
        index
        for index, word in enumerate(words)
        if word == "paceline" and (index == 0 or words[index - 1] in ("--", "-m", "srun"))
    ]
    return [words[start + 1 :] for start in starts]


def _models(arguments: list[str]) -> list[str]:
    """Returns the values of every --model flag, which may take several."""
    models: list[str] = []
    collecting = False
    for word in arguments:
        collecting = word == "--model" if word.startswith("--") else collecting
        if collecting and not word.startswith("--"):
            models.append(word)
    return models


def _check(arguments: list[str]) -> None:
    if arguments[0] in _NOT_PARSED:
        return
    for model in _models(arguments):
        find_model(model)
    try:
        parse(arguments)
    except (SystemExit, PacelineError):
        if not any(_PLACEHOLDER.search(word) for word in arguments):
            raise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_the_commands_of_a_page_are_understood(page: pathlib.Path) -> None:
    for command in _commands(page.read_text(encoding="utf-8")):
        for arguments in _invocations(command):
            _check(arguments)


PAGE = """
```console
$ paceline env --self-test   # a comment
$ paceline lab run --hosts 2 -- \\
    paceline bench ddp --model small
```
```bash
#SBATCH --nodes=2
srun paceline bench ddp --model xl
```
```text
paceline env
nothing else
```
| question | `paceline bench step --model small large` |
Running text names `paceline plan`.
"""


def test_all_ways_to_print_a_command_are_found() -> None:
    found = [arguments for line in _commands(PAGE) for arguments in _invocations(line)]
    assert [" ".join(arguments) for arguments in found] == [
        "env --self-test",
        "lab run --hosts 2 -- paceline bench ddp --model small",
        "bench ddp --model small",
        "bench ddp --model xl",
        "env",
        "bench step --model small large",
    ]


@pytest.mark.parametrize(
    "command",
    [
        "bench step --modell small",
        "bench step --model small smal --context 128",
        "lab run --hosts many -- true",
        "plan account --model xxl --what",
        "report tables",
    ],
)
def test_a_command_that_is_none_is_refused(command: str) -> None:
    with pytest.raises((SystemExit, PacelineError)):
        _check(shlex.split(command))


def test_placeholders_are_let_pass_only_where_they_are() -> None:
    _check(shlex.split("lab run --hosts HOSTS --rate 1gbit -- true"))
    with pytest.raises(PacelineError):
        _check(shlex.split("bench step --model MODEL"))
