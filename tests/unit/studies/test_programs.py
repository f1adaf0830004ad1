"""Tests that every program of studies/ starts, and that its folder's README describes it."""

import importlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
PROGRAMS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "studies").rglob("*.py"))
    if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
]
_OPTIONAL = ("torchdata", "torchft")
"""Packages that studies compare with, and that may not be installed."""


def test_all_programs_are_found() -> None:
    assert len(PROGRAMS) >= 45


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        program = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 0
    # Its own docstring states the command.
    assert f"python -m {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_readme_of_a_folder_lists_its_programs(name: str) -> None:
    readme = ROOT.joinpath(*name.split(".")[:-1], "README.md").read_text(encoding="utf-8")
    assert f"python -m {name}" in readme


def test_every_record_has_a_program_that_exists() -> None:
    listed = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    named = {word for word in listed.replace("`", " ").split() if word.startswith("studies.")}
    assert len(named) >= 30
    assert named <= set(PROGRAMS)
