"""Tables and figures of the docs about planning and prediction, from their records.

python -m studies.planner.figures
"""

import sys
from collections.abc import Sequence

from matplotlib.figure import Figure

from paceline.predict.backtest import (
    HeldOutPrediction,
    backtest_cases,
    leave_one_out,
    predict_others,
)
from paceline.records import Record, RecordStore
from paceline.reports.plots.planning import FrontMark, plot_backtest, plot_front
from paceline.reports.tables.predictions import backtest_table
from paceline.reports.tables.table import Table
from studies.harness.docs import RESULTS, publish, read
from studies.planner.accuracy import ablation_table, accuracy_table, plot_validation, regret_table
from studies.planner.calibration_repeats import repeats_table
from studies.planner.memory_figures import (
    device_memory_table,
    plot_published_memory,
    published_memory_table,
)
from studies.planner.search_tables import (
    batches_table,
    layouts_table,
    published_table,
    recipes_table,
    speed_table,
)
from studies.planner.unseen_tables import (
    after_runs_table,
    experts_table,
    known_table,
    plot_after_runs,
    unseen_table,
)


def tables() -> dict[str, Table]:
    """Returns the tables by name."""
    searches, mixtures = read("plan-search"), read("plan-search-experts")
    validation = read("planner-validation")
    held_out, counted = backtested_steps()
    return {
        "plan-search": layouts_table(_study(searches, "example")),
        "plan-search-nvidia": recipes_table(
            _study(searches, "NVIDIA"),
            "NeMo's published recipes on H100s, and what the search finds for the same batch",
        ),
        "plan-search-llama3": published_table(_study(searches, "Llama 3")),
        "plan-search-100000": batches_table(_study(searches, "100,000 devices")),
        "plan-search-experts": layouts_table(_study(mixtures, "experts")),
        "plan-search-experts-nvidia": recipes_table(
            _study(mixtures, "experts, NVIDIA"),
            "Megatron-Bridge's published recipes for mixtures on H100s in float8, and what the "
            "search finds for the same batch",
        ),
        "plan-search-speed": speed_table(read("plan-search-speed")),
        "planner-accuracy": accuracy_table(validation),
        "planner-regret": regret_table(validation),
        "planner-ablation": ablation_table(validation),
        "planner-unseen": unseen_table(read("planner-unseen")),
        "planner-after-runs": after_runs_table(read("planner-unseen")),
        "planner-known": known_table(read("planner-known")),
        "planner-experts": experts_table(read("planner-experts")),
        "device-memory": device_memory_table(read("device-memory")),
        "planner-memory": published_memory_table(read("planner-memory")),
        "step-backtest": backtest_table(held_out, counted=counted),
        # All repetitions of a case count, not the newest alone.
        "calibration-repeats": repeats_table(
            RecordStore(RESULTS / "calibration-repeats.jsonl").read()
        ),
    }


def backtested_steps() -> tuple[list[HeldOutPrediction], int]:
    """Returns held-out predictions of steps, and the number of leading ones that count."""
    counted, others = (
        backtest_cases(RecordStore(RESULTS / f"{name}.jsonl").read())
        for name in ("step-backtest", "step-backtest-4-ranks")
    )
    return [*leave_one_out(counted), *predict_others(others, counted)], len(counted)


def draw_backtest() -> Figure:
    """Draws predicted against measured steps."""
    held_out, counted = backtested_steps()
    return plot_backtest(held_out, counted=counted)


def draw_front() -> Figure:
    """Draws the best layout for each number of devices."""
    subtitle = "llama3-70B, 10^12 tokens in batches of 4M, h100-sxm: best layout by devices"
    return plot_front(_marks(_study(read("plan-search"), "front")), subtitle)


def _marks(records: Sequence[Record]) -> list[FrontMark]:
    """Returns the points to draw for a recorded front."""
    marks = []
    for record in records:
        time, devices = record.metrics["step_time_s"], int(str(record.case["devices"]))
        days = record.metrics["days_without_failures"].value
        marks.append(
            FrontMark(
                devices=devices,
                layout=str(record.case["layout"]),
                device_hours=days * 24 * devices,
                days=days,
                low=days * (time.low or time.value) / time.value,
                high=days * (time.high or time.value) / time.value,
                on_front=bool(record.case["on_front"]),
            )
        )
    return marks


def _study(searches: Sequence[Record], name: str) -> list[Record]:
    return [record for record in searches if record.case["study"] == name]


FIGURES = {
    "plan-front": draw_front,
    "planner-accuracy": lambda: plot_validation(read("planner-validation")),
    "planner-unseen": lambda: plot_after_runs(read("planner-unseen")),
    "planner-memory": lambda: plot_published_memory(read("planner-memory")),
    "step-backtest": draw_backtest,
}


def main() -> int:
    """Writes the tables and figures."""
    return publish(__doc__, tables, FIGURES)


if __name__ == "__main__":
    sys.exit(main())
