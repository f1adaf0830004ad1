"""Writes the docs' table of strategies and features from the tests that show each cell.

python scripts/features_table.py
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
TABLES = ROOT / "docs" / "generated"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.distributed.strategy_features import table  # noqa: E402


def tables() -> dict[str, str]:
    """Returns the tables by the names of their files."""
    return {"strategy-features.md": table()}


def main() -> int:
    """Writes what the docs include."""
    for name, text in tables().items():
        (TABLES / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
