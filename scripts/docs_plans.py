"""Tables and figures of docs/which-layout.md and docs/planner-accuracy.md, from their records."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from paceline.records import Record
from paceline.reports.plots.planning.search import plot_front, recorded_marks
from paceline.reports.tables.planning.recorded import (
    batches_table,
    layouts_table,
    published_table,
    recipes_table,
    speed_table,
)
from paceline.reports.tables.planning.validation import ablation_table, accuracy_table, regret_table
from paceline.reports.tables.table import Table


def plan_tables(
    searches: Sequence[Record], speeds: Sequence[Record], mixtures: Sequence[Record]
) -> dict[str, Table]:
    """Returns the tables of layout searches by name."""
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
        "plan-search-speed": speed_table(speeds),
    }


def validation_tables(records: Sequence[Record]) -> dict[str, Table]:
    """Returns the tables of held-out errors, regret and ablated terms by name."""
    return {
        "planner-accuracy": accuracy_table(records),
        "planner-regret": regret_table(records),
        "planner-ablation": ablation_table(records),
    }


def plan_front(searches: Sequence[Record]) -> Figure:
    """Draws the best layout for each number of devices."""
    subtitle = "llama3-70B, 10^12 tokens in batches of 4M, h100-sxm: best layout by devices"
    return plot_front(recorded_marks(_study(searches, "front")), subtitle)


def _study(searches: Sequence[Record], name: str) -> list[Record]:
    return [record for record in searches if record.case["study"] == name]
