"""Tests that the committed tables and pictures of the docs match what the programs generate."""

import importlib
import pathlib

import figures
import pytest

from paceline.reports.tables.table import render_markdown

ROOT = pathlib.Path(__file__).parents[2]
TABLES = ROOT / "docs" / "generated"

studies = {name: importlib.import_module(f"studies.{name}.figures") for name in figures.STUDIES}


def _compare(tables: dict[str, str], program: str) -> None:
    for name, text in tables.items():
        committed = (TABLES / name).read_text(encoding="utf-8")
        assert committed == text, f"{name} is out of date; run {program}"


def test_generated_tables_are_up_to_date() -> None:
    _compare(figures.tables(), "scripts/figures.py")


@pytest.mark.parametrize("study", studies)
def test_tables_of_studies_are_up_to_date(study: str) -> None:
    tables = {f"{name}.md": render_markdown(t) for name, t in studies[study].tables().items()}
    _compare(tables, f"python -m studies.{study}.figures")


def test_every_study_with_figures_is_run() -> None:
    assert {path.parent.name for path in ROOT.glob("studies/*/figures.py")} == set(figures.STUDIES)


def test_every_picture_of_the_docs_is_generated() -> None:
    pictures = {path.stem for path in figures.IMAGES.iterdir()}
    of_studies = [getattr(module, "FIGURES", {}) for module in studies.values()]
    of_studies.append(studies["scaling"].COURSE_FIGURES)
    made = [name for group in of_studies for name in group]
    assert pictures == {*figures.PICTURE_SOURCES, *figures.DRAWN, *made}
