"""Tests that every promise of SECURITY.md names a test that exists."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
_SECTIONS = dict(
    re.findall(
        r"^## (.*?)\n(.*?)(?=^## |\Z)",
        (ROOT / "SECURITY.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)


def _rows(section: str) -> list[list[str]]:
    """Returns the cells of the rows of all tables of a section, without headers."""
    lines = [line for line in _SECTIONS[section].splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if row[0] not in ("promise", "who", "limit", "---")]


@functools.cache
def _functions(path: pathlib.Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("promise", "tests"), _rows("What holds"))
def test_a_promise_has_a_test(promise: str, tests: str) -> None:
    if tests.startswith("not tested"):
        return
    named = re.findall(r"`(\S+\.py)::(\w+)`", tests)
    assert len(named) == len(tests.split(", ")), f"{promise} names something else than tests"
    for path, name in named:
        assert name in _functions(ROOT / "tests" / path)


def test_promises_stand_in_tables() -> None:
    """A sentence outside the tables would have no test."""
    assert len(_rows("What holds")) >= 25
    for section in ("Who is trusted", "What holds", "What does not hold"):
        paragraphs = [part for part in _SECTIONS[section].split("\n\n") if part.strip()]
        prose = [part for part in paragraphs if not part.strip().startswith(("|", "**"))]
        assert len(prose) == (section == "What holds")
