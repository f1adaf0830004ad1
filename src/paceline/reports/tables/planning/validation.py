"""Tables of the planner's accuracy, from the records of scripts/planner_validation.py."""

from collections.abc import Sequence

from paceline.records import Record
from paceline.reports.tables.table import Table

ALL = "all"


def accuracy_table(records: Sequence[Record]) -> Table:
    """Returns a row per source: errors and intervals with the model held out."""
    chosen = _studies(records, "accuracy", "")
    return Table(
        headers=(
            *("source", "rows", "models", "error, mean", "median", "largest"),
            *("inside the 90% interval", "its half-width, median"),
        ),
        rows=tuple(
            (
                str(record.case["source"]),
                f"{_value(record, 'rows'):,.0f}",
                f"{_value(record, 'models'):.0f}",
                *(
                    f"{_value(record, name):.1%}"
                    for name in ("mean_error", "median_error", "largest_error")
                ),
                f"{_value(record, 'coverage'):.0%}",
                f"±{_value(record, 'half_width'):.1%}",
            )
            for record in chosen
        ),
        caption=(
            "Step times predicted while their model was held out (one number of devices, where a "
            "source has one model)"
        ),
    )


def regret_table(records: Sequence[Record]) -> Table:
    """Returns the regret of each source that has sweeps of at least five layouts."""
    return Table(
        headers=(
            *("source", "sweeps", "layouts", "first choice, mean", "largest"),
            *("best of three", "rule of thumb", "random"),
        ),
        rows=tuple(
            (
                str(record.case["source"]),
                f"{_value(record, 'sweeps'):.0f}",
                f"{_value(record, 'layouts'):,.0f}",
                *(
                    f"{_value(record, name):.1%}"
                    for name in ("first", "largest_first", "best_of_three")
                ),
                *(f"{_value(record, name):.0%}" for name in ("rule_of_thumb", "random")),
            )
            for record in _studies(records, "regret", "")
        ),
        caption=(
            "Regret: measured time of the layout that is picked over that of the best one, less 1"
        ),
    )


def ablation_table(records: Sequence[Record]) -> Table:
    """Returns a row per term and source: error and regret with and without the term."""
    whole = {str(record.case["source"]): record for record in _studies(records, "accuracy", "")}
    picks = {
        (str(record.case["source"]), str(record.case["without"])): record
        for record in records
        if record.case["study"] == "regret"
    }
    rows = []
    for record in records:
        term, source = str(record.case["without"]), str(record.case["source"])
        if record.case["study"] != "accuracy" or not term:
            continue
        regrets = (picks.get((source, "")), picks.get((source, term)))
        rows.append(
            (
                term.replace("_", " "),
                source,
                f"{_value(record, 'mean_error'):.1%}",
                f"{_value(whole[source], 'mean_error'):.1%}",
                *(
                    "" if each is None else f"{_value(each, 'first'):.1%}"
                    for each in reversed(regrets)
                ),
            )
        )
    return Table(
        headers=("term", "source", "error without it", "with it", "regret without it", "with it "),
        rows=tuple(rows),
        caption="Mean held-out error, and mean regret of the first choice, without a term and with",
    )


def _studies(records: Sequence[Record], study: str, without: str) -> list[Record]:
    chosen = [
        record
        for record in records
        if (record.case["study"], record.case["without"]) == (study, without)
    ]
    # The summary of all sources comes last.
    return sorted(chosen, key=lambda record: (record.case["source"] == ALL, _key(record)))


def _key(record: Record) -> str:
    return str(record.case["source"]).lower()


def _value(record: Record, name: str) -> float:
    return record.metrics[name].value
