"""Tests that every local link of the documentation has a target."""

import pathlib
import re

import pytest

from tests.unit.project_files import project_files

ROOT = pathlib.Path(__file__).parents[2]
_CODE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def _pages() -> list[str]:
    listed = project_files(ROOT, "*.md")
    return [name for name in listed if not name.startswith("docs/generated/")]


def _anchors(page: pathlib.Path) -> set[str]:
    """Returns the anchors of a page's headings, as mkdocs and code hosts derive them."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"\s", "-", heading) for heading in words}


@pytest.mark.parametrize("name", _pages())
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if re.match(r"https://", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name}: {link} does not exist"
        if name.startswith("docs/"):
            assert target.is_relative_to(ROOT / "docs"), f"{name}: {link} leaves the manual"
        if fragment:
            assert fragment in _anchors(target), f"{name}: {link} names no heading"


def test_every_page_of_the_manual_is_in_its_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages == set(re.findall(r": ([\w-]+\.md)$", navigation, re.MULTILINE))
