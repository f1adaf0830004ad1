"""Tests that the committed tables and pictures of the docs match what the scripts generate."""

import importlib.util
import pathlib
import types

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def load(name: str) -> types.ModuleType:
    path = ROOT / "scripts" / f"{name}.py"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


figures = load("figures")
scaling_figures = load("scaling_figures")
SCRIPTS = [figures, scaling_figures, load("features_table")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_generated_tables_are_up_to_date(script: types.ModuleType) -> None:
    for name, text in script.tables().items():
        committed = (script.TABLES / name).read_text(encoding="utf-8")
        assert committed == text, f"{name} is out of date; run scripts/{script.__name__}.py"


def test_every_picture_of_the_docs_is_generated() -> None:
    pictures = {path.stem for path in figures.IMAGES.iterdir()}
    assert pictures == {*figures.PICTURE_SOURCES, *figures.DRAWN, *scaling_figures.PICTURES}
