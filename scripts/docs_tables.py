"""Tables that only the docs show: repeated calibrations, data, and scaling-law studies."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from paceline.core.errors import UsageError
from paceline.core.units import KIB, MIB
from paceline.predict.calibration import Calibration, calibration_runs
from paceline.records import Record
from paceline.reports.tables.columns import with_interval
from paceline.reports.tables.table import Table

# The breakpoints of a piecewise fit differ from run to run, but its times at fixed sizes can be
# compared.
_SIZES = (64 * KIB, MIB, 25 * MIB)
_FEWEST_RUNS = 2


def repeats_table(records: Iterable[Record]) -> Table:
    """Returns a table of the spread between repeated calibrations of a topology, by quantity.

    The range of a number is its largest minus its smallest value, divided by the median.
    """
    runs = calibration_runs(records)
    if len({tuple(run.topology.values()) for run in runs}) != 1 or len(runs) < _FEWEST_RUNS:
        raise UsageError("repeated calibrations of one place are needed")
    ranges: dict[str, list[float]] = {}
    for (label, _), values in _repeated(runs).items():
        middle = statistics.median(values)
        if middle > 0:
            ranges.setdefault(label, []).append((max(values) - min(values)) / middle)
    everything = [value for group in ranges.values() for value in group]
    return Table(
        headers=("quantity", "numbers", "median range", "largest range"),
        rows=tuple(
            (label, str(len(group)), f"{statistics.median(group):.1%}", f"{max(group):.1%}")
            for label, group in (*ranges.items(), ("all", everything))
        ),
        caption=(
            f"{len(runs)} calibrations in a row; for each number, its largest less its smallest "
            "value, over their median"
        ),
    )


def _repeated(runs: Sequence[Calibration]) -> dict[tuple[str, object], list[float]]:
    """Returns the values of all runs by label and subject."""
    values: dict[tuple[str, object], list[float]] = {}
    for run in runs:
        for label, subject, value in _numbers(run):
            values.setdefault((label, subject), []).append(value)
    return values


def _numbers(run: Calibration) -> Iterator[tuple[str, object, float]]:
    for label, timed in (("linear layers", run.linears), ("attention", run.attentions)):
        for entry in timed:
            yield f"{label}, forward", entry.dimensions, entry.forward_s
            yield f"{label}, backward", entry.dimensions, entry.backward_s
    yield "elementwise", None, run.elementwise_s_per_element
    yield "memory", None, run.copy_s_per_element
    yield "calls", "forward", run.forward_launch_s
    yield "calls", "backward", run.backward_launch_s
    yield "optimizer", None, run.optimizer_s_per_parameter
    for operation, fit in run.collectives.items():
        for size in _SIZES:
            yield "collectives, 64 KiB to 25 MiB", (operation, size), fit.time_s(size)
    for operation, contention in run.contentions.items():
        yield "contention: lost per byte", operation, contention.lost_s_per_byte
        yield "contention: slowdown", operation, contention.slowdown


def backtest_summary(records: Sequence[Record]) -> Table:
    """Returns a table of each method's extrapolation errors, by sweep and number of budgets."""
    groups: dict[tuple[str, str], dict[int, list[Record]]] = {}
    for record in records:
        sweep, method = str(record.case["sweep"]), str(record.case["method"])
        windows = groups.setdefault((sweep, method), {})
        windows.setdefault(int(record.case["num_budgets"]), []).append(record)
    shown = sorted({number for windows in groups.values() for number in windows})
    most = {number: max(len(windows[number]) for windows in groups.values()) for number in shown}
    rows = []
    for (sweep, method), windows in groups.items():
        cells = [sweep, method]
        for number in shown:
            errors = [_backtest_error(record) for record in windows[number]]
            held = sum(_is_held(record) for record in windows[number])
            cells.append(
                f"{statistics.mean(errors):.2%}, at most {max(errors):.2%}; held "
                f"{held} of {most[number]}"
                + (f", none in {most[number] - len(errors)}" if len(errors) < most[number] else "")
            )
        rows.append(tuple(cells))
    return Table(
        headers=("sweep", "method", *(f"{number} budgets" for number in shown)),
        rows=tuple(rows),
        caption="error of the least loss at 8 times the largest budget fitted: mean, largest, and "
        "how often the 90% interval held it; chosen: by budgets held out inside each window",
    )


def _backtest_error(record: Record) -> float:
    return abs(record.metrics["loss"].value / record.metrics["observed_loss"].value - 1)


def _is_held(record: Record) -> bool:
    loss, observed = record.metrics["loss"], record.metrics["observed_loss"].value
    return loss.low is not None and loss.high is not None and loss.low <= observed <= loss.high


def answers_table(records: Sequence[Record]) -> Table:
    """Returns records of kind scaling as a table, one row per method and budget."""
    rows = tuple(
        (
            f"{record.case['compute_budget']:.0e}".replace("e+", "e"),
            str(record.case["method"]),
            *(
                with_interval(record.metrics[name], f"{{:{digits}}}".format)
                for name, digits in _ANSWER_METRICS.items()
            ),
        )
        for record in records
        if record.kind == "scaling"
    )
    headers = ("FLOPs", "method", *_ANSWER_METRICS)
    return Table(headers=headers, rows=rows, caption="90% intervals in brackets")


_ANSWER_METRICS = {"parameters": ".3g", "tokens": ".3g", "loss": ".4f"}


def study_table(records: Sequence[Record], study: str) -> Table:
    """Returns a table of the studies whose names start with `study`, with metrics as columns."""
    chosen = [record for record in records if str(record.case["study"]).startswith(study)]
    names = list(dict.fromkeys(name for record in chosen for name in record.metrics))
    shared = {str(record.case["num_sweeps"]) for record in chosen if "num_sweeps" in record.case}
    return Table(
        headers=("study", "noise", *(name.replace("_", " ") for name in names)),
        rows=tuple(
            (
                str(record.case.get("departure") or record.case["study"]),
                f"{record.case['noise']:.1%}",
                *(
                    f"{record.metrics[name].value:{_STUDY_DIGITS.get(name, '.3g')}}"
                    for name in names
                ),
            )
            for record in chosen
        ),
        caption=f"{', '.join(sorted(shared))} sweeps each" if shared else "processor seconds",
    )


_STUDY_DIGITS = {
    **dict.fromkeys(("covered", "covered_loss", "warned", "within_tenth"), ".1%"),
    **dict.fromkeys(("bias",), "+.1%"),
}


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
