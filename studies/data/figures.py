"""Tables of loaders and of preparing text, from their records.

python -m studies.data.figures
"""

import sys
from collections.abc import Sequence

from paceline.records import Record
from paceline.reports.tables.table import Table
from studies.harness.docs import publish, read

_READERS = {
    "read: bare": "bare `numpy.memmap` loop",
    "read: loader": "`TokenLoader`",
    "read: digests": "with digests, the default",
    "read: prefetch": "with digests and a prefetch thread, nobody computing beside it",
    "read: torchdata": "torchdata's `StatefulDataLoader`",
}


def data_loader_table(records: Sequence[Record]) -> Table:
    """Returns a table of reading speeds, compared with a bare loop."""
    by_subject = {str(record.case["subject"]): record for record in records}
    rows = []
    for subject, label in _READERS.items():
        metrics = by_subject[subject].metrics
        rows.append(
            (
                label,
                f"{metrics['tokens_per_s'].value / 1e6:,.0f} M",
                f"{metrics['time_ratio'].value:.2f}",
                f"{metrics['times_training_ratio'].value:,.0f}",
            )
        )
    case = by_subject["read: bare"].case
    trained = by_subject["train: bytes-6M"].metrics["tokens_per_s"].value
    return Table(
        headers=("reader", "tokens/s", "time, of bare", "times what bytes-6M trains"),
        rows=tuple(rows),
        caption=(
            f"batches of {case['batch']} sequences of {case['context']:,} tokens, one core, "
            f"{case['rounds']} rounds in turn; bytes-6M trains {trained:,.0f} tokens/s here"
        ),
    )


def data_resume_table(records: Sequence[Record]) -> Table:
    """Returns a table of state sizes and resume times at nine tenths of an epoch."""
    rows = [
        (
            "`TokenLoader`" if record.case["subject"] == "resume: own" else "`StatefulDataLoader`",
            f"{record.case['context']:,}",
            f"{record.metrics['state_bytes'].value:,.0f} B",
            f"{record.metrics['resume_time_s'].value * 1e3:,.0f} ms",
        )
        for record in records
        if str(record.case["subject"]).startswith("resume: ")
    ]
    return Table(
        headers=("loader", "context", "state", "resume"),
        rows=tuple(rows),
        caption="268 million tokens, left at nine tenths of an epoch",
    )


def data_prepare_table(records: Sequence[Record]) -> Table:
    """Returns a table of how fast text becomes shards."""
    rows = [
        (
            str(record.case["subject"]),
            f"{record.metrics['mb_per_s'].value:.2f}",
            str(record.case["baseline"]),
            f"{record.metrics['time_ratio'].value:.2f}",
            str(record.case["rounds"]),
        )
        for record in records
    ]
    return Table(
        headers=("way", "MB/s", "compared with", "time, of that", "rounds"),
        rows=tuple(rows),
        caption="13.2 MB of English in 373 files, a vocabulary of 16,384; ratios round by round",
    )


def tables() -> dict[str, Table]:
    """Returns the tables by name."""
    return {
        "data-loader": data_loader_table(read("data-loader")),
        "data-resume": data_resume_table(read("data-loader")),
        "data-prepare": data_prepare_table(read("data-prepare")),
    }


def main() -> int:
    """Writes the tables and figures."""
    return publish(__doc__, tables, {})


if __name__ == "__main__":
    sys.exit(main())
