"""Tables and figure that compare layouts with the plan, and the host's time of each container.

python -m studies.parallel.figures
"""

import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.units import format_binary_bytes, format_decimal
from paceline.predict.backtest import (
    BacktestCase,
    HeldOutPrediction,
    accuracy,
    leave_one_out,
    predict_others,
)
from paceline.records import Record, join_key
from paceline.records.kinds import LINK_RATE, PREDICTION
from paceline.reports.plots.planning import plot_backtest
from paceline.reports.tables.table import Table
from studies.harness.docs import publish, read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYOUT_TERMS = {
    "compute": ("compute_s", "imbalance_s", "bubble_s"),
    "memory": ("memory_s", "launch_s"),
    "optimizer": ("optimizer_s",),
    "engine": ("engine_s",),
    "exposed": ("tensor_s", "context_s", "stages_s", "data_s"),
}
"""The planner's terms, grouped by shared correction factor."""
STEP, PEAK = "step_time_s", "peak_bytes"
Place = tuple[str, str]
"""A model and the link between hosts."""


class Study(NamedTuple):
    """Layouts with predictions and measurements."""

    cases: list[BacktestCase]
    time_errors: list[float]
    """Relative errors of the plan's uncorrected step times."""
    memory_errors: list[float]
    rounds: dict[tuple[Place, str], tuple[float, ...]]
    """Step times by place and layout; the layouts of a place took turns."""


class Choice(NamedTuple):
    """The layout that the plan would choose at a place, compared with the fastest one."""

    place: Place
    held_out: list[HeldOutPrediction]
    """Predictions for the layouts of the place, corrected by the cases of all other places."""
    chosen: BacktestCase
    fastest: BacktestCase
    regret: float
    """Relative extra step time of the chosen layout over the fastest: median of the rounds."""


def read_study(records: Sequence[Record]) -> Study:
    """Joins measured layouts with their predictions."""
    predicted = {join_key(each): each for each in records if each.kind == PREDICTION}
    pairs = [
        (each, predicted[join_key(each)])
        for each in records
        if each.kind == "layout" and each.outcome == "ok" and join_key(each) in predicted
    ]
    return Study(
        cases=[_case(*pair) for pair in pairs],
        time_errors=[_error(*pair, STEP) for pair in pairs],
        memory_errors=[_error(*pair, PEAK) for pair in pairs],
        rounds={
            (_place(_case(*pair)), str(pair[0].case["layout"])): pair[0].metrics[STEP].samples or ()
            for pair in pairs
        },
    )


def choices(study: Study) -> list[Choice]:
    """Returns the plan's choice at each place, made without the place's own measurements."""
    cases, found = study.cases, []
    for place in dict.fromkeys(_place(case) for case in cases):
        here = [case for case in cases if _place(case) == place]
        others = [case for case in cases if _place(case) != place]
        held_out = predict_others(here, others, LAYOUT_TERMS)
        chosen = min(held_out, key=lambda each: each.predicted.value).case
        fastest = min(here, key=lambda case: case.measured_s)
        own, least = (study.rounds[place, case.labels["layout"]] for case in (chosen, fastest))
        regret = statistics.median(a / b for a, b in zip(own, least, strict=True)) - 1
        found.append(Choice(place, held_out, chosen, fastest, regret))
    return found


def layouts_table(records: Sequence[Record]) -> Table:
    """Returns a table with a row per model and link: errors, choice and regret."""
    study = read_study(records)
    by_place: dict[Place, list[HeldOutPrediction]] = {}
    for each in leave_one_out(study.cases, LAYOUT_TERMS):
        by_place.setdefault(_place(each.case), []).append(each)
    memory: dict[Place, list[float]] = {}
    for case, error in zip(study.cases, study.memory_errors, strict=True):
        memory.setdefault(_place(case), []).append(abs(error))
    rows = []
    for choice in choices(study):
        model, link = choice.place
        errors = [abs(each.error or 0.0) for each in by_place[choice.place]]
        rows.append(
            (
                *(model, link, str(len(errors))),
                f"{statistics.median(errors):.1%}",
                f"{max(memory[choice.place]):.1%}",
                f"`{choice.chosen.labels['layout']}`",
                f"`{choice.fastest.labels['layout']}`",
                f"{choice.regret:.1%}",
            )
        )
    return Table(
        headers=(
            *("model", "link between hosts", "layouts", "time, median error"),
            *("memory, largest error", "chosen", "fastest", "regret"),
        ),
        rows=tuple(rows),
        caption=f"Four ranks on two cores, gloo. {summary(study)}",
    )


def summary(study: Study) -> str:
    """Returns the errors over all cases as a sentence."""
    held_out = accuracy(leave_one_out(study.cases, LAYOUT_TERMS))
    plain = statistics.median(map(abs, study.time_errors))
    memory = list(map(abs, study.memory_errors))
    return (
        f"{len(study.cases)} cases: step time {held_out.median_error:.1%} in the median, each "
        f"corrected by the others ({held_out.ninetieth_error:.1%} in nine of ten; {plain:.1%} "
        f"uncorrected), memory {statistics.median(memory):.1%} in the median, at most "
        f"{max(memory):.1%}"
    )


def layout_times_table(records: Sequence[Record], model: str) -> Table:
    """Returns a table with a row per layout of a model: measured step and error for each link."""
    cases = leave_one_out(read_study(records).cases, LAYOUT_TERMS)
    cases = [each for each in cases if each.case.labels["model"] == model]
    links = list(dict.fromkeys(each.case.labels["link"] for each in cases))
    cells: dict[str, dict[str, str]] = {}
    for each in cases:
        labels, measured = each.case.labels, each.case.measured_s
        cells.setdefault(labels["layout"], {})[labels["link"]] = (
            f"{measured * 1e3:,.0f} ({each.error:+.0%})"
        )
    return Table(
        headers=("layout", *(f"{link} (ms)" for link in links)),
        rows=tuple(
            (f"`{layout}`", *(by_link.get(link, "") for link in links))
            for layout, by_link in cells.items()
        ),
        caption=f"{model}: median step measured, and how far the prediction was off",
    )


def scale_table(records: Sequence[Record]) -> Table:
    """Returns a table with a row per rank that was laid out on the meta device."""
    rows = []
    for record in records:
        held, planned = (record.metrics[name].value for name in ("tensor_bytes", "planned_bytes"))
        rows.append(
            (
                str(record.case["subject"]),
                f"{record.metrics['time_s'].value:.1f}",
                format_binary_bytes(record.metrics["process_bytes"].value),
                f"{held:,.0f}",
                f"{planned:,.0f}",
                f"{held / planned:.5f}",
            )
        )
    return Table(
        headers=(
            *("layout, rank", "laid out in (s)", "peak of the process so far"),
            *("bytes of its parameters", "the planner's, fullest stage", "ratio"),
        ),
        rows=tuple(rows),
        caption="Llama 3 70B, 1,024 ranks of torch's fake process group, in one process",
    )


def host_time_table(records: Sequence[Record]) -> Table:
    """Returns a table with a row per model and container: costs of a step and its phases."""
    rows = []
    for model in dict.fromkeys(str(record.case["model"]) for record in records):
        costs: dict[str, dict[str, float]] = {}
        ratios: dict[str, str] = {}
        for record in records:
            if record.case["model"] != model:
                continue
            case, metrics = record.case, record.metrics
            for name, times in (("baseline", "baseline_time_s"), ("subject", "time_s")):
                cost = metrics[times].value - metrics["plain_time_s"].value
                costs.setdefault(str(case[name]), {})[str(case["phase"])] = cost
            if case["phase"] == "step":
                ratio = metrics["time_ratio"]
                shown = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
                ratios[str(case["subject"])] = f"{shown} of `{case['baseline']}`"
        for name, cost_of in sorted(costs.items(), key=lambda item: item[0] in ratios):
            cells = (f"{1e6 * cost:.1f}" for cost in cost_of.values())
            rows.append((model, f"`{name}`", *cells, ratios.get(name, "")))
    phases = dict.fromkeys(str(record.case["phase"]) for record in records)
    return Table(
        headers=("model", "container", *phases, "step with the module's own"),
        rows=tuple(rows),
        caption="Microseconds of the host per parameter, beyond those of the plain module and its "
        "optimizer: CPU time of the training thread, one of two ranks of torch's fake process "
        "group; medians. Last, whole steps over torch's, with 95% intervals",
    )


def _case(own: Record, plan: Record) -> BacktestCase:
    terms = {
        name: plan.metrics[name].value if name in plan.metrics else 0.0
        for names in LAYOUT_TERMS.values()
        for name in names
    }
    rate = own.case.get(LINK_RATE)
    labels = {
        "model": _model(own),
        "layout": str(own.case["layout"]),
        "ranks": str(own.case["world_size"]),
        "link": "loopback" if rate is None else format_decimal(float(str(rate)), "bit/s"),
    }
    return BacktestCase(labels=labels, terms=terms, measured_s=own.metrics[STEP].value)


def _model(record: Record) -> str:
    """Returns the name of the preset, or a description of a custom shape."""
    case = record.case
    if case["model"] != "custom":
        return str(case["model"])
    sizes = f"{case['num_layers']} layers of width {case['d_model']}"
    return f"{sizes}, vocabulary {case['vocab_size']:,}"


def _place(case: BacktestCase) -> Place:
    return case.labels["model"], case.labels["link"]


def _error(own: Record, plan: Record, metric: str) -> float:
    return plan.metrics[metric].value / own.metrics[metric].value - 1


def tables() -> dict[str, Table]:
    """Returns the tables by name."""
    layouts = read("layouts")
    return {
        "layouts": layouts_table(layouts),
        "layout-times": layout_times_table(layouts, "bytes-6M"),
        "layout-scale": scale_table(read("layout-scale")),
        "hook-cost": host_time_table(read("hook-cost")),
    }


def draw_layouts() -> "Figure":
    """Draws steps of layouts, each predicted with a correction fitted to all others."""
    cases = read_study(read("layouts")).cases
    return plot_backtest(leave_one_out(cases, LAYOUT_TERMS), counted=len(cases))


FIGURES = {"layouts-backtest": draw_layouts}


def main() -> int:
    """Writes the tables and figures."""
    return publish(__doc__, tables, FIGURES)


if __name__ == "__main__":
    sys.exit(main())
