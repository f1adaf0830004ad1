"""Generates what the manual says about the code: the API reference, problems, features, keys.

    python scripts/reference.py

docs/generated/reference.md lists every name that a package exports, so that none is forgotten;
mkdocs renders the docstrings. docs/generated/course.md is course/README.md with links adapted to
the manual. docs/generated/strategy-features.md comes from the tests that verify each of its cells,
docs/generated/decided-keys.md from the table of keys that a sweep decides. A test compares all of
them with the committed files.
"""

import ast
import pathlib
import re
import sys

from paceline.loop.run_config import DECIDED

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "paceline"
TABLES = ROOT / "docs" / "generated"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.distributed.strategy_features import table as strategy_features  # noqa: E402


def exports() -> dict[str, tuple[str, list[str]]]:
    """Returns, by package, the first line of its docstring and its exported names."""
    rooms = {}
    for path in sorted(PACKAGE.glob("*/__init__.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                summary = (ast.get_docstring(tree) or "").partition("\n")[0]
                rooms[f"paceline.{path.parent.name}"] = (summary, ast.literal_eval(node.value))
    return rooms


def course_page() -> str:
    """Returns course/README.md as a page of the manual, without its title."""
    text = (ROOT / "course" / "README.md").read_text(encoding="utf-8").partition("\n")[2].lstrip()
    text = text.replace("](../docs/", "](")
    # Files outside the manual are named, not linked.
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"`\1`", text)


def reference_page() -> str:
    """Returns the mkdocs directives of all exported names, by package."""
    parts = []
    for room, (summary, names) in exports().items():
        parts.append(f"## {room}\n\n{summary}\n")
        parts += [f"::: {room}.{name}\n" for name in names]
    return "\n".join(parts)


def decided_keys() -> str:
    """Returns the table of the keys that a sweep or a loop decides, with the reasons."""
    rows = [f"| `{key}` | {reason} |" for key, reason in DECIDED.items()]
    return "\n".join(["| key | why it is not yours |", "| --- | --- |", *rows, ""])


def tables() -> dict[str, str]:
    """Returns the generated pages and tables by file name."""
    return {
        "reference.md": reference_page(),
        "course.md": course_page(),
        "strategy-features.md": strategy_features(),
        "decided-keys.md": decided_keys(),
    }


def main() -> int:
    """Writes the pages and tables."""
    for name, text in tables().items():
        (TABLES / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
