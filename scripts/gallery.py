"""Generates the gallery: every figure of the manual, its page and the command that made it."""

import pathlib
import re
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[1]
_PICTURE = re.compile(r"!\[([^\]]*)\]\(images/([\w-]+)\.(?:png|svg)\)")
# The commands at the start of a cell; remarks about the measurement follow them.
_MADE_BY = re.compile(
    r"^\| `([\w/-]+?)(?:\.jsonl?|/)` \| (`[^`]*`(?:; `[^`]*`)*).* \|$", re.MULTILINE
)


def gallery(stores: Mapping[str, str]) -> str:
    """Returns a page with all figures, in the order of the manual's pages.

    A figure that several pages show is listed once, under the last of them.

    Args:
        stores: The file or directory of results/ that each figure is drawn from. Figures drawn
            from formulas alone have no entry.
    """
    listing = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    commands = dict(_MADE_BY.findall(listing))
    order = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    texts = {page: (ROOT / "docs" / page).read_text(encoding="utf-8") for page in order}
    last_page = {name: page for page in order for _, name in _PICTURE.findall(texts[page])}
    parts: list[str] = []
    for page in order:
        found = [each for each in _PICTURE.findall(texts[page]) if last_page[each[1]] == page]
        if not found:
            continue
        title = texts[page].partition("\n")[0].removeprefix("# ")
        parts.append(f"## [{title}]({page})\n")
        for words, name in found:
            made = "Drawn from formulas, without a measurement."
            if name in stores:
                made = f"Made by {commands[stores[name]]}."
            parts.append(f"![{words}](images/{name}.svg)\n\n{words}. {made}\n")
    return "\n".join(parts)
