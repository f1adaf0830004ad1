"""Generates the docs' table of strategies and features from the tests that verify each cell.

    python scripts/features_table.py

Writes docs/generated/strategy-features.md.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
TABLES = ROOT / "docs" / "generated"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.distributed.strategy_features import table  # noqa: E402


def tables() -> dict[str, str]:
    """Returns the tables by file name."""
    return {"strategy-features.md": table()}


def main() -> int:
    """Writes the tables that the docs include."""
    for name, text in tables().items():
        (TABLES / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
