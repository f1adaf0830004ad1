"""The gallery: every picture of the manual, where it is explained, and what made it."""

import pathlib
import re
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[1]
_PICTURE = re.compile(r"!\[([^\]]*)\]\(images/([\w-]+)\.(?:png|svg)\)")
_MADE_BY = re.compile(r"^\| `([\w/-]+?)(?:\.jsonl?|/)` \| (.*) \|$", re.MULTILINE)


def gallery(stores: Mapping[str, str]) -> str:
    """Returns all pictures as a page, in the order of the manual's pages.

    Args:
        stores: The file or directory of results/ that each picture is drawn from. Of a picture
            that is drawn from formulas alone there is none.
    """
    listing = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    commands = dict(_MADE_BY.findall(listing))
    order = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    parts: list[str] = []
    for page in order:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        found = _PICTURE.findall(text)
        if not found:
            continue
        title = text.partition("\n")[0].removeprefix("# ")
        parts.append(f"## [{title}]({page})\n")
        for words, name in found:
            made = "Drawn from formulas, without a measurement."
            if name in stores:
                made = f"Made by {commands[stores[name]]}."
            parts.append(f"![{words}](images/{name}.svg)\n\n{words}. {made}\n")
    return "\n".join(parts)
