"""Pages of the manual that list all records and all figures, with the commands that made them."""

import pathlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from paceline.records import Record
from paceline.records.kinds import PREDICTION

ROOT = pathlib.Path(__file__).parents[1]
_LISTING = ROOT / "results" / "README.md"
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
    commands = dict(_MADE_BY.findall(_LISTING.read_text(encoding="utf-8")))
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


def _pages_by_table() -> dict[str, tuple[str, str]]:
    """Returns the file and title of the page that shows each table."""
    pages = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'--8<-- "generated/([\w-]+)\.md"', text):
            pages[name] = (path.name, text.partition("\n")[0].removeprefix("# "))
    return pages


def _where(records: list[Record]) -> str:
    """Returns the processors, torch versions and dates of records as text."""
    days = sorted({record.environment.time[:10] for record in records})
    processors = sorted({record.environment.processor for record in records})
    versions = sorted({record.environment.packages.get("torch", "none") for record in records})
    period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{', '.join(processors)}, torch {', '.join(versions)}, {period}"


def benchmarks(tables: Mapping[str, Sequence[str]], read: Callable[[str], list[Record]]) -> str:
    """Returns a page of all stores in results/: command, outcomes, environment and tables.

    Args:
        tables: Names of the tables that show each store.
        read: Reads a store by its name.
    """
    listing = _LISTING.read_text(encoding="utf-8")
    pages = _pages_by_table()
    parts = []
    for files, command in re.findall(r"^\| (`.*?) \| (.*) \|$", listing, re.MULTILINE):
        for store in re.findall(r"`([\w-]+)\.jsonl`", files):
            records = read(store)
            outcomes = Counter(record.outcome for record in records if record.kind != PREDICTION)
            counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            names = tables.get(store, ())
            shown = sorted({pages[name] for name in names if name in pages})
            links = ", ".join(f"[{title}]({file})" for file, title in shown)
            parts.append(f"### {store}\n\nMade by {command}.\n")
            discussed = f" Discussed in {links}." if links else ""
            parts.append(f"{counted}. {_where(records)}.{discussed}\n")
            parts += [f'--8<-- "generated/{name}.md"\n' for name in names]
    return "\n".join(parts)
