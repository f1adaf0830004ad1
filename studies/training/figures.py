"""Table of losses after a run resumes in another layout, from `results/train-continue.jsonl`.

python -m studies.training.figures
"""

import sys
from collections.abc import Sequence

from paceline.records import Record
from paceline.reports.tables.table import Table
from studies.harness.docs import publish, read


def train_continue_table(records: Sequence[Record]) -> Table:
    """Returns a table of the loss differences after a run resumes in another layout."""
    rows = [
        (
            str(record.case["baseline"]),
            str(record.case["subject"]),
            f"{record.metrics['loss_difference'].value:.1e}",
        )
        for record in records
    ]
    return Table(
        headers=("trained on", "moved to", "largest difference of a loss, relative"),
        rows=tuple(rows),
        caption="50 steps after a move, beside the run that was never moved",
    )


def tables() -> dict[str, Table]:
    """Returns the tables by name."""
    return {"train-continue": train_continue_table(read("train-continue"))}


def main() -> int:
    """Writes the tables and figures."""
    return publish(__doc__, tables, {})


if __name__ == "__main__":
    sys.exit(main())
