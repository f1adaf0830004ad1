"""Tables and figures of loops from a budget to a model, from `results/loop`.

    python -m studies.loop.figures

The files there come from `loops.py`, `baselines.py` and `kills.py`.
"""

import math
import sys
from typing import TYPE_CHECKING

import msgspec

from paceline.loop.choose import fit_sweep
from paceline.loop.directory import SWEEP_ENTRIES, LoopDirectory, Outcome
from paceline.loop.sweep_directory import RunRow
from paceline.predict.history import HistoryEntry, accuracy_by_quantity
from paceline.records import RecordStore
from paceline.reports.plots.scaling_laws import plot_errors, plot_target
from paceline.reports.plots.style import dark
from paceline.reports.tables.predictions import WRITTEN, coverage_table, outcome_table
from paceline.reports.tables.table import Table
from paceline.scaling.design import learn_from
from studies.harness.docs import RESULTS, publish
from studies.loop.baselines import RANDOM, RULE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOPS = RESULTS / "loop"
FIRST = LOOPS / "seed-0"


def tables() -> dict[str, Table]:
    """Returns the tables of predictions, measurements, baselines and kills by name."""
    directory = LoopDirectory(FIRST)
    finals = [entry for each in _loops() for entry in _outcome(each).entries]
    return {
        "loop": outcome_table(_outcome(directory).entries, _caption(directory)),
        "loop-seeds": _seeds_table(),
        "loop-coverage": coverage_table(accuracy_by_quantity(finals), "Final runs of all loops"),
        "loop-sweeps": coverage_table(accuracy_by_quantity(_sweep_entries()), "Runs of the sweeps"),
        "loop-baselines": _baselines_table(),
        "loop-kills": _kills_table(),
    }


def _loops() -> list[LoopDirectory]:
    return [LoopDirectory(path) for path in sorted(LOOPS.glob("seed-*"))]


def _seeds_table() -> Table:
    """Returns a table with a row per loop: its model and the error of each prediction."""
    rows = []
    for each in _loops():
        model, entries = each.model(), _outcome(each).entries
        assert model is not None
        rows.append(
            (
                str(each.spec().seed),
                f"{model.run.parameters:,}",
                f"{model.run.tokens:,}",
                f"{model.extrapolation:.1f}x",
                *(_error(entry) for entry in entries),
            )
        )
    quantities = (WRITTEN[entry.quantity][0] for entry in _outcome(LoopDirectory(FIRST)).entries)
    return Table(
        headers=("seed", "parameters", "tokens", "extrapolated", *quantities),
        rows=tuple(rows),
        caption="Errors of the predictions; * is outside of the 90% interval",
    )


def _error(entry: HistoryEntry) -> str:
    return f"{entry.error:+.1%}{'' if entry.is_inside else '*'}"


def _baselines_table() -> Table:
    """Returns a table of the loop's model and of common alternatives with the same FLOPs."""
    directory = LoopDirectory(FIRST)
    model, outcome = directory.model(), _outcome(directory)
    assert model is not None
    runs = [
        msgspec.json.decode(line, type=RunRow)
        for line in (LOOPS / "baselines.jsonl").read_bytes().splitlines()
    ]
    drawn = sorted(
        (run for run in runs if run.name.startswith(RANDOM) and run.final_loss is not None),
        key=lambda run: run.final_loss or math.inf,
    )
    (rule,) = [run for run in runs if run.name == RULE]
    final = model.run
    trained = [
        ("loop", final.parameters, final.tokens, final.learning_rate, heldout_loss(outcome)),
        *(
            (what, run.num_parameters, run.tokens, run.learning_rate, run.final_loss)
            for what, run in (
                ("rule of thumb", rule),
                (f"best of {len(drawn)} random runs", drawn[0]),
                (f"median of {len(drawn)} random runs", drawn[len(drawn) // 2]),
            )
        ),
    ]
    return Table(
        headers=("", "parameters", "tokens", "learning rate", "held-out loss"),
        rows=tuple(
            (what, f"{parameters:,}", f"{tokens:,}", f"{rate:.1e}", f"{loss:.4f}")
            for what, parameters, tokens, rate, loss in trained
        ),
        caption=(
            f"Budget of each row: {outcome.run_flops:.2g} FLOPs. The sweep of the loop spent "
            f"{outcome.sweep_flops:.2g} FLOPs before"
        ),
    )


def _kills_table() -> Table:
    """Returns a table of a loop that was killed and resumed, and of the same loop without kills."""
    (record,) = RecordStore(LOOPS / "kills.jsonl").read()
    values = {name: metric.value for name, metric in record.metrics.items()}
    written = {
        "runs": ("num_runs", "{:.0f}"),
        "parameters of the chosen model": ("parameters", "{:,.0f}"),
        "its tokens": ("tokens", "{:,.0f}"),
        "its predicted loss": ("predicted_loss", "{:.6f}"),
        "its held-out loss": ("heldout_loss", "{:.6f}"),
        "runs finished twice": ("runs_finished_twice", "{:.0f}"),
        "samples missed or read twice": ("samples_wrong", "{:.0f}"),
    }
    stages = ", ".join(
        f"{value:.0f} in stage {name.removeprefix('kills_')}"
        for name, value in values.items()
        if name.startswith("kills_") and value
    )
    return Table(
        headers=("", f"killed {values['num_tried']:.0f} times", "not killed"),
        rows=tuple(
            (
                what,
                style.format(values[name]),
                style.format(values[other]) if (other := f"uninterrupted_{name}") in values else "",
            )
            for what, (name, style) in written.items()
        ),
        caption=f"SIGKILL: {stages}",
    )


def _sweep_entries() -> list[HistoryEntry]:
    return [
        entry
        for path in sorted(LOOPS.glob(f"seed-*/{SWEEP_ENTRIES}"))
        for entry in msgspec.json.decode(path.read_bytes(), type=tuple[HistoryEntry, ...])
    ]


def draw_target() -> "Figure":
    """Draws the sweep, the law and the final run of the first loop."""
    directory = LoopDirectory(FIRST)
    model = directory.model()
    assert model is not None
    loss = heldout_loss(_outcome(directory))
    found = fit_sweep(directory.sweep)
    posterior, budget = learn_from(found.runs), directory.spec().budget
    return plot_target(found, posterior, budget, model.loss, loss)


def draw_errors() -> "Figure":
    """Draws every prediction of the first loop, relative to its measurement."""
    return plot_errors(_outcome(LoopDirectory(FIRST)).entries)


def _outcome(directory: LoopDirectory) -> Outcome:
    outcome = directory.outcome()
    assert outcome is not None
    return outcome


def heldout_loss(outcome: Outcome) -> float:
    """Returns the measured held-out loss of a loop's final run."""
    (loss,) = [each.measured for each in outcome.entries if each.quantity == "heldout_loss"]
    return loss


def _caption(directory: LoopDirectory) -> str:
    model, layout = directory.model(), directory.layout()
    assert model is not None
    assert layout is not None
    run = model.run
    return (
        f"{run.parameters:,} parameters, {run.tokens:,} tokens, {run.flops:.3g} FLOPs, "
        f"{model.extrapolation:.1f} times the largest run of the sweep; {layout.chosen.ranks} "
        f"ranks on {layout.hardware}"
    )


FIGURES = {
    "loop-target": draw_target,
    "loop-target-dark": lambda: dark(draw_target),
    "loop-errors": draw_errors,
}


def main() -> int:
    """Writes the tables and figures."""
    return publish(__doc__, tables, FIGURES)


if __name__ == "__main__":
    sys.exit(main())
