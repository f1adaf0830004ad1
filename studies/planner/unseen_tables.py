"""Tables and plot of frameworks that the planner has not seen, from the records of the studies."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from paceline.planner.calibrations.relatives import DRAWN
from paceline.records import Record
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure
from paceline.reports.tables.table import Table

_RANDOM, _CHOSEN, _NEW_DEVICE = "random", "chosen", "new device"


def unseen_table(records: Sequence[Record]) -> Table:
    """Returns a row per framework that was left out of everything: errors before its runs."""
    chosen = [
        each for each in records if each.case["study"] == "unseen" and each.case["how"] == "none"
    ]
    after = {
        str(each.case["source"]): each
        for each in records
        if each.case["study"] == "unseen" and _how(each) == (_RANDOM, 1)
    }
    return Table.of(
        chosen,
        {
            "framework that is left out": lambda each: each.case["source"],
            "rows": lambda each: f"{_value(each, 'rows'):,.0f}",
            "error, mean": lambda each: f"{_value(each, 'mean_error'):.1%}",
            "median": lambda each: f"{_value(each, 'median_error'):.1%}",
            "bias": lambda each: f"{_value(each, 'bias'):+.1%}",
            "inside the 90% interval": lambda each: f"{_value(each, 'coverage'):.0%}",
            "mean after one run of its own": lambda each: (
                f"{_value(after[str(each.case['source'])], 'mean_error'):.1%}"
                if str(each.case["source"]) in after
                else ""
            ),
        },
        caption=(
            "Step times of a framework predicted from all others, without any of its runs and "
            "after one that is drawn at random; the interval is that of the others' errors"
        ),
    )


def after_runs_table(records: Sequence[Record]) -> Table:
    """Returns a row per number of own runs, and how they were chosen."""
    chosen = sorted(
        (each for each in records if each.case["study"] == "unseen_mean"),
        key=lambda each: (_ORDER[str(each.case["how"])], _how(each)[1]),
    )
    return Table.of(
        chosen,
        {
            "own runs": lambda each: _runs_text(*_how(each)),
            "frameworks": lambda each: f"{_value(each, 'frameworks'):.0f}",
            "error, mean of their means": lambda each: f"{_value(each, 'mean_error'):.1%}",
            "largest": lambda each: f"{_value(each, 'largest_error'):.1%}",
            "90% interval": lambda each: f"±{_value(each, 'half_width'):.0%}",
            "inside it": lambda each: f"{_value(each, 'coverage'):.0%}",
        },
        caption="Frameworks that were left out, after some runs of their own; each weighs the same",
    )


_ORDER = {"none": 0, _RANDOM: 1, _CHOSEN: 2, _NEW_DEVICE: 3}


def _runs_text(how: str, count: int) -> str:
    if how == _NEW_DEVICE:
        return "all on its other devices"
    return f"{count}, {how}" if count else "none"


def known_table(records: Sequence[Record]) -> Table:
    """Returns a row per pool of runs: its held-out errors by way to fit it, and the one it has."""
    by_pool: dict[str, dict[str, Record]] = {}
    for each in records:
        if each.case["study"] == "known":
            by_pool.setdefault(str(each.case["source"]), {})[str(each.case["how"])] = each

    def error(how: str) -> Callable[[str], str]:
        return lambda pool: (
            f"{_value(by_pool[pool][how], 'mean_error'):.1%}" if how in by_pool[pool] else ""
        )

    return Table.of(
        sorted(by_pool),
        {
            "runs": lambda pool: pool,
            "rows": lambda pool: f"{_value(by_pool[pool]['own'], 'rows'):,.0f}",
            "by themselves": error("own"),
            "drawn, without relatives": error("pooled"),
            "drawn": error("drawn"),
            "nested choice": error("nested"),
            "inside 90% if drawn": lambda pool: f"{_value(by_pool[pool]['drawn'], 'coverage'):.0%}",
            "calibration": lambda pool: "drawn" if pool in DRAWN else "by themselves",
        },
        caption=(
            "Mean errors of step times with the model held out, from a fit of the framework's runs "
            "by themselves and from the prior of all frameworks, drawn to its runs"
        ),
    )


def experts_table(records: Sequence[Record]) -> Table:
    """Returns a row per mixture that was left out, and per source of runs seen later."""
    studies = {"experts": "left out", "experts_mean": "all of these", "prospective": "seen later"}
    return Table.of(
        [each for each in records if each.case["study"] in studies],
        {
            "mixture": lambda each: str(each.case["source"]).replace("_", " "),
            "": lambda each: studies[str(each.case["study"])],
            "rows": lambda each: f"{_value(each, 'rows'):,.0f}",
            "error, mean": lambda each: f"{_value(each, 'mean_error'):.1%}",
            "median": lambda each: f"{_value(each, 'median_error'):.1%}",
            "bias": lambda each: f"{_value(each, 'bias'):+.1%}",
            "90% interval": lambda each: f"±{_value(each, 'half_width'):.0%}",
            "inside it": lambda each: f"{_value(each, 'coverage'):.0%}",
        },
        caption=(
            "Mixtures of experts: each model left out of Megatron-Bridge's runs, and runs that "
            "were added after terms and priors had been chosen"
        ),
    )


def plot_after_runs(records: Sequence[Record]) -> Figure:
    """Draws the mean error and the interval over the number of a framework's own runs."""
    figure = blank_figure("Frameworks that the planner has not seen", (9, 4))
    left, right = figure.subplots(1, 2)
    means = [each for each in records if each.case["study"] == "unseen_mean"]
    for number, how in enumerate((_RANDOM, _CHOSEN)):
        points = sorted(
            (each for each in means if _how(each)[0] in ("none", how)),
            key=lambda each: _how(each)[1],
        )
        counts = range(len(points))
        label = {_RANDOM: "drawn at random", _CHOSEN: "chosen by plan calibrate"}[how]
        for axes, name in ((left, "mean_error"), (right, "half_width")):
            values = [100 * _value(each, name) for each in points]
            axes.plot(counts, values, "o-", color=COLORS[number], label=label, markersize=4)
            axes.set_xticks(counts, [str(_how(each)[1]) for each in points])
    single = [each for each in records if each.case["study"] == "unseen"]
    for name in sorted({str(each.case["source"]) for each in single}):
        own = sorted(
            (
                each
                for each in single
                if each.case["source"] == name and _how(each)[0] in ("none", _RANDOM)
            ),
            key=lambda each: _how(each)[1],
        )
        values = [100 * _value(each, "mean_error") for each in own]
        left.plot(range(len(values)), values, color=GRAY, linewidth=0.6, zorder=0)
    left.set_ylabel("mean error in %; gray: each framework")
    right.set_ylabel("half-width of the 90% interval in %")
    for axes in (left, right):
        axes.set_xlabel("measured runs of its own")
        axes.set_ylim(bottom=0)
        add_grid(axes, "y")
    right.legend(fontsize=8)
    return figure


def _how(record: Record) -> tuple[str, int]:
    return str(record.case["how"]), int(str(record.case["num_own_runs"]))


def _value(record: Record, name: str) -> float:
    return record.metrics[name].value
