"""Tables of all injected faults from committed records: tried, survived and lost.

python -m studies.reliability.figures
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.records import Record
from paceline.reports.tables.table import Table
from studies.harness.docs import publish, read

_MOST_DIFFERENCE = 1e-5
"""Largest accepted relative difference of a loss after a run resumes in another layout."""


class Row(NamedTuple):
    """One row: a fault and the records of its trials."""

    what: str
    store: str
    holds: str
    """Criterion for a trial to count as survived."""
    is_of: Callable[[Record], bool] = lambda _: True
    """Returns whether a record of the store belongs to the row."""


def _fault(*words: str) -> Callable[[Record], bool]:
    return lambda record: any(word in str(record.case["fault"]) for word in words)


def _except(*words: str) -> Callable[[Record], bool]:
    return lambda record: not _fault(*words)(record)


def _subject(name: str) -> Callable[[Record], bool]:
    return lambda record: record.case["subject"] == name


_AS_IF = "goes on from the newest checkpoint; losses and parameters to the bit as without kills"
_ONCE = "every sample used exactly once"

ROWS = (
    Row("SIGKILL of a rank, in any phase", "kills", _AS_IF, _except("launcher")),
    Row(
        "SIGKILL of the launcher",
        "kills",
        "its ranks gone within 5 s; as above",
        _fault("launcher"),
    ),
    Row(
        "SIGKILL of a replica",
        "replicas",
        f"the others train on; it heals from one of them; {_ONCE}",
        _except("launcher"),
    ),
    Row(
        "SIGKILL of the launcher of replicas, and its lighthouse",
        "replicas",
        f"replicas gone within 5 s; started again, goes on from disk; {_ONCE}",
        _fault("launcher"),
    ),
    Row(
        "EIO, ENOSPC, EROFS, ESTALE at any system call of a save",
        "disk-faults",
        "the checkpoint before it is intact; the message names the cause; the next save succeeds",
    ),
    Row(
        "a checkpoint damaged: bits flipped, files cut, extended, zeroed, deleted, swapped, aged",
        "checkpoint-damage",
        "found, named, and the one before it loaded",
    ),
    Row(
        "another number of ranks, 1 to 4, or another strategy",
        "train-continue",
        f"losses within {_MOST_DIFFERENCE:g} for 50 steps",
    ),
    Row(
        "a bit flipped in weights or optimizer state",
        "corruption",
        "found within 5 steps, the rank named; to the bit as if it had not happened",
        _fault("flipped"),
    ),
    Row("steps without a fault", "corruption", "no alarm", _fault("none")),
    Row(
        "gradients or loss of a rank NaN or infinite",
        "bad-steps",
        "all ranks leave the batch out; losses and parameters to the bit as if it had never come",
        _fault("NaN"),
    ),
    Row(
        "a rank half as slow again",
        "bad-steps",
        "named within 10 steps, and no other rank",
        _fault("slow"),
    ),
    Row(
        "a rank stopped for 5 s",
        "bad-steps",
        "named in the first step after; trains on",
        _fault("SIGSTOP"),
    ),
    Row(
        "Slurm: TERM, USR1 before the time limit, requeue, a lost node, scancel",
        "slurm-faults",
        "saved and left within the grace time, or went on from the newest checkpoint",
    ),
    Row(
        "SIGKILL of a loop from a budget to a model",
        "loop/kills",
        "the same runs, model and held-out loss as without kills; no run finished twice",
    ),
    Row(
        "a link down, at 50 Mbit/s, or with 2% loss",
        "chaos-links",
        f"trains on; losses to the bit; {_ONCE}",
        lambda record: record.kind == "chaos_fault",
    ),
    Row(
        "configs, records, traces, plans and other files, damaged",
        "hostile-files",
        "an error that names the file, within 10 s and 500 MB",
    ),
    Row(
        "two or three commands on one directory, started and killed at random",
        "ownership",
        "a second command is refused; in the end as one undisturbed command, to the byte",
    ),
    Row(
        "half an hour on 2 ranks",
        "soak",
        "memory grows by less than 1%, file descriptors not at all",
        _subject("soak"),
    ),
    Row(
        "half an hour on 4 ranks that are killed, stopped and robbed of checkpoints",
        "soak",
        "the same",
        _subject("soak with chaos"),
    ),
)


def reliability_table() -> Table:
    """Returns the table of all faults that were tried."""
    rows = []
    for row in ROWS:
        records = [record for record in read(row.store) if row.is_of(record)]
        tried, lost = map(sum, zip(*map(_counts, records), strict=True))
        rows.append(
            (row.what, f"{tried:,}", f"{tried - lost:,}", f"{lost:,}", row.holds, f"`{row.store}`")
        )
    return Table(
        headers=("what happens", "tried", "survived", "lost", "survived means", "record"),
        rows=tuple(rows),
        caption="Two to four ranks on two cores, gloo",
    )


def _counts(record: Record) -> tuple[int, int]:
    """Returns the number of trials in a record, and how many of them lost something."""
    if record.kind == "fault":
        return int(record.metrics["num_tried"].value), int(record.metrics["num_lost"].value)
    if "loss_difference" in record.metrics:
        return 1, int(record.metrics["loss_difference"].value > _MOST_DIFFERENCE)
    return 1, int(record.outcome != "ok")


def kills_table(records: Sequence[Record]) -> Table:
    """Returns the table of kills of supervised runs, by victim and phase."""
    by_fault: dict[str, list[Record]] = {}
    for record in records:
        by_fault.setdefault(str(record.case["fault"]), []).append(record)
    rows = [
        (fault.removeprefix("SIGKILL "), *_kill_cells(group))
        for fault, group in sorted(by_fault.items())
    ]
    return Table(
        headers=("SIGKILL", "tried", "survived", "lost", "back after, median (s)", "worst (s)"),
        rows=(*rows, ("all", *_kill_cells(records))),
        caption="From the kill to the end of the first step after it",
    )


_PARTS = {
    "silent_s": "from the last sign of life of the rank that failed until its end is noticed",
    "wait_s": "until new ranks are forked",
    "rendezvous_s": "until they have met",
    "load_s": "until model and optimizer are built and loaded",
    "first_step_s": "until the first step is done",
}


def recovery_table(records: Sequence[Record]) -> Table:
    """Returns the table of the parts of a restart and their times."""
    rows = []
    for name, meaning in _PARTS.items():
        times = _samples(records, name)
        shown = f"{statistics.median(times):.3f}", f"{max(times):.3f}"
        rows.append((f"`{name}`", meaning, *shown))
    return Table(
        headers=("detail", "seconds", "median", "worst"),
        rows=tuple(rows),
        caption=f"{len(_samples(records, 'load_s'))} restarts of a small model on two ranks",
    )


def replicas_table(records: Sequence[Record]) -> Table:
    """Returns the table of killed replicas: pauses of the others, and times until recovery."""
    (killed,) = [record for record in records if "paused_s" in record.metrics]
    rows = [
        (label, f"{statistics.median(times):.1f}", f"{min(times):.1f}", f"{max(times):.1f}")
        for label, name in (
            ("the others stood still", "paused_s"),
            ("the lost replica was away", "away_s"),
        )
        if (times := _samples([killed], name))
    ]
    tried, num_lost = _counts(killed)
    return Table(
        headers=("seconds", "median", "shortest", "longest"),
        rows=tuple(rows),
        caption=f"{tried} kills of replicas, {num_lost} of them with something lost",
    )


def _samples(records: Sequence[Record], name: str) -> list[float]:
    return [
        seconds
        for record in records
        if name in record.metrics
        for seconds in record.metrics[name].samples or ()
    ]


def _kill_cells(group: Sequence[Record]) -> tuple[str, ...]:
    tried, lost = map(sum, zip(*map(_counts, group), strict=True))
    times = _samples(group, "recovery_s")
    shown = (f"{statistics.median(times):.2f}", f"{max(times):.2f}") if times else ("-", "-")
    return str(tried), str(tried - lost), str(lost), *shown


def tables() -> dict[str, Table]:
    """Returns the tables by name."""
    return {
        "reliability": reliability_table(),
        "kills": kills_table(read("kills")),
        "recovery": recovery_table(read("kills")),
        "replicas": replicas_table(read("replicas")),
    }


def main() -> int:
    """Writes the tables and figures."""
    return publish(__doc__, tables, {})


if __name__ == "__main__":
    sys.exit(main())
