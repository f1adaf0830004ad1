"""Docs and records cannot part: what is generated is what is committed."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]

specification = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
assert specification is not None
assert specification.loader is not None
figures = importlib.util.module_from_spec(specification)
specification.loader.exec_module(figures)


def test_generated_tables_are_up_to_date() -> None:
    for name, text in figures.tables().items():
        committed = (figures.TABLES / name).read_text(encoding="utf-8")
        assert committed == text, f"{name} is out of date; run scripts/figures.py"


def test_every_picture_of_the_docs_is_generated() -> None:
    pictures = {path.stem for path in figures.IMAGES.iterdir()}
    assert pictures == {*figures.PICTURE_SOURCES, *figures.DRAWN}
