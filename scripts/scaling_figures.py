"""Generates the tables and figures of docs/scaling-laws.md.

    PACELINE_COURSE_DATA=isoflops_curves.json python scripts/scaling_figures.py

Tables come from committed records; a test compares them with the committed files. Figures come from
a synthetic sweep, a committed backtest and, if available, the courses' runs.
"""

import os
import pathlib
import sys

from docs_tables import answers_table, backtest_summary, study_table

from paceline.records import RecordStore, latest_per_case
from paceline.reports.plots.scaling_laws.backtest import plot_scaling_backtest
from paceline.reports.plots.scaling_laws.fitted import SCALING_PLOTS, plot_laws
from paceline.reports.plots.style import save_figure
from paceline.reports.tables.table import render_markdown
from paceline.scaling import fit, read_sweep, synthetic_sweep
from paceline.scaling.surface import EPOCH

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "results"
TABLES = ROOT / "docs" / "generated"
IMAGES = ROOT / "docs" / "images"
_NOISY = "scaling-laws-noisy"
_BACKTEST = "scaling-porian"
PICTURES = (*SCALING_PLOTS, _NOISY, _BACKTEST)


def tables() -> dict[str, str]:
    """Returns every generated table by its file name."""
    course, studies, speed = (
        latest_per_case(RecordStore(RESULTS / f"{name}.jsonl").read())
        for name in ("scaling-course", "scaling-studies", "scaling-speed")
    )
    backtest = list(RecordStore(RESULTS / "scaling-porian.jsonl").read())
    made = {
        "scaling-porian": backtest_summary(backtest),
        "scaling-course": answers_table(course),
        "scaling-coverage": study_table(studies, "coverage"),
        "scaling-warnings": study_table(studies, "warning"),
        "scaling-design": study_table(studies, "error"),
        "scaling-speed": study_table(speed, "speed"),
    }
    return {f"{name}.md": render_markdown(table) for name, table in made.items()}


def main() -> int:
    """Writes tables and figures."""
    for name, text in tables().items():
        (TABLES / name).write_text(text, encoding="utf-8")
    noisy = fit(synthetic_sweep(EPOCH, noise=0.01, seed=1))
    save_figure(plot_laws(noisy), IMAGES, _NOISY)
    backtest = list(RecordStore(RESULTS / "scaling-porian.jsonl").read())
    save_figure(plot_scaling_backtest(backtest), IMAGES, _BACKTEST)
    course_data = os.environ.get("PACELINE_COURSE_DATA")
    if course_data is None:
        print("PACELINE_COURSE_DATA is not set: the courses' pictures stay as they are")
        return 0
    found = fit(read_sweep(pathlib.Path(course_data)))
    for name, plot in SCALING_PLOTS.items():
        save_figure(plot(found), IMAGES, name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
