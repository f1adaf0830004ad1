"""Tables and figures of docs/scaling-laws.md.

    PACELINE_COURSE_DATA=isoflops_curves.json python -m studies.scaling.figures

Tables come from committed records. Figures come from a synthetic sweep, a committed backtest and,
if available, the courses' runs.
"""

import functools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.records import Record, RecordStore
from paceline.records.schema import with_interval
from paceline.reports.plots.scaling_laws import SCALING_PLOTS, plot_laws
from paceline.reports.tables.table import Table
from paceline.scaling import fit, read_sweep, synthetic_sweep
from paceline.scaling.fits.all_methods import ScalingFit
from paceline.scaling.surface import EPOCH
from studies.harness.docs import RESULTS, Figures, publish, read
from studies.scaling.backtest_figures import backtest_summary, plot_scaling_backtest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tables() -> dict[str, Table]:
    """Returns the tables by name."""
    studies = read("scaling-studies")
    return {
        "scaling-porian": backtest_summary(_backtest()),
        "scaling-course": answers_table(read("scaling-course")),
        "scaling-coverage": study_table(studies, "coverage"),
        "scaling-warnings": study_table(studies, "warning"),
        "scaling-design": study_table(studies, "error"),
        "scaling-speed": study_table(read("scaling-speed"), "speed"),
    }


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


def _backtest() -> list[Record]:
    return list(RecordStore(RESULTS / "scaling-porian.jsonl").read())


FIGURES: Figures = {
    "scaling-laws-noisy": lambda: plot_laws(fit(synthetic_sweep(EPOCH, noise=0.01, seed=1))),
    "scaling-porian": lambda: plot_scaling_backtest(_backtest()),
}


@functools.cache
def _course_fit() -> ScalingFit:
    return fit(read_sweep(os.environ["PACELINE_COURSE_DATA"]))


def _draw_course(name: str) -> "Figure":
    return SCALING_PLOTS[name](_course_fit())


COURSE_FIGURES: Figures = {name: functools.partial(_draw_course, name) for name in SCALING_PLOTS}
"""Figures of the courses' runs, which are not part of the repository."""


def main() -> int:
    """Writes tables and figures."""
    if "PACELINE_COURSE_DATA" in os.environ:
        return publish(__doc__, tables, {**FIGURES, **COURSE_FIGURES})
    print("PACELINE_COURSE_DATA is not set: the courses' pictures stay as they are")
    return publish(__doc__, tables, FIGURES)


if __name__ == "__main__":
    sys.exit(main())
