"""Tests that docs/where.md, which maps tasks to files, names existing files."""

import pathlib
import pkgutil
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"
ROWS = [
    line
    for line in (ROOT / "docs" / "where.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| I want"))
]
GUESSES = {
    # A word that a newcomer would search for, and the path that contains it.
    "bucket": "parallel/buckets.py",
    "step": "predict/step.py",
    "strategies": "reports/plots/strategies.py",
    "calibrat": "benchmarks/calibration.py",
    "hardware": "core/hardware.py",
    "checkpoint": "parallel/zero/optimizer_checkpoint.py",
    "fsdp": "parallel/fsdp/container.py",
    "triton": "kernels/attention/triton/forward.py",
    "backtest": "predict/backtest.py",
    "document": "reports/document.py",
}


def test_there_are_enough_rows() -> None:
    assert len(ROWS) >= 25


@pytest.mark.parametrize("row", ROWS)
def test_a_row_leads_to_files(row: str) -> None:
    paths = re.findall(r"`([\w/]+(?:\.py|/))`", row)
    assert paths
    assert all((PACKAGE / path).exists() or (ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("word", GUESSES)
def test_the_name_of_a_thing_is_in_its_path(word: str) -> None:
    path = GUESSES[word]
    assert word in path
    assert any(f"`{path}`" in row for row in ROWS)


def test_every_term_of_the_glossary_is_somewhere_in_the_code() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    names = re.findall(r"`(paceline\.[\w.]+)` \|$", text, re.MULTILINE)
    assert len(names) >= 20
    for name in names:
        assert pkgutil.resolve_name(name) is not None
