"""Tests of figures and tables of scaling laws, from sweeps on a known surface."""

import pytest

from paceline.reports.document import picture_of
from paceline.reports.plots.scaling_laws import (
    SCALING_PLOTS,
    plot_laws,
    plot_profiles,
    plot_residuals,
)
from paceline.reports.tables.scaling import methods_table, run_text, runs_table, waste_table
from paceline.scaling import CandidateRun, ScalingFit, SweepDesign, fit, synthetic_sweep
from paceline.scaling.decide import decide
from paceline.scaling.records import run_record
from tests.unit.scaling.surfaces import SURFACE


@pytest.fixture(scope="module")
def found() -> ScalingFit:
    return fit(synthetic_sweep(SURFACE, noise=0.003), num_draws=30)


@pytest.mark.slow
def test_pictures_are_reproducible_and_drawn_without_minima_too(found: ScalingFit) -> None:
    edge = fit(synthetic_sweep(SURFACE, SweepDesign(offset=0.1), noise=0.001), num_draws=10)
    for name, plot in SCALING_PLOTS.items():
        first, second = (picture_of(plot(found), name, "").svg for _ in range(2))
        assert first == second
        assert len(first) > 5000
        plot(edge)


def test_laws_reach_1e24_residuals_are_in_per_cent_and_minima_marked(found: ScalingFit) -> None:
    panels = plot_laws(found).axes
    assert all(axes.get_xlim()[1] >= 1e24 for axes in panels)
    lines, labels = panels[0].get_legend_handles_labels()
    assert labels == [method.method for method in found.methods]
    budgets, sizes = lines[labels.index("parametric")].get_data()  # type: ignore[attr-defined]
    assert sizes == pytest.approx(SURFACE.optimal_parameters(budgets), rel=0.3)
    residuals = [y for line in plot_residuals(found).axes[0].lines for y in line.get_ydata()]
    assert 0.3 < max(residuals) < 3, "of 0.3% of noise"
    (axes,) = plot_profiles(found).axes
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert len(crosses) == len(found.profiles)


def test_tables_say_what_was_decided(found: ScalingFit) -> None:
    (decision,) = decide(found, [1e23])
    table = methods_table(found, [decision], 0.9)
    assert [row[1] for row in table.rows] == [method.method for method in found.methods]
    assert all(" to " in row[3] for row in table.rows)
    for row in table.rows:
        assert float(row[6]) == pytest.approx(1e23 / 6 / float(row[3].split()[0]) ** 2, rel=0.02)
    assert any("left out: envelope" in note for note in table.notes)
    assert "33.3 times" in table.caption
    wasted = [f"{each.wasted:.2%}" for each in decision.waste]
    assert [row[2] for row in waste_table(decision).rows] == wasted
    assert len(wasted) == 6
    assert f"{decision.run.parameters:,} parameters" in run_text(decision)


def test_runs_add_up_to_their_cost() -> None:
    run = CandidateRun(parameters=1e6, tokens=1e9, cost=2.5)
    proposed = runs_table([run_record(run), run_record(run)])
    assert proposed.headers == ("FLOPs", "parameters", "tokens", "cost so far")
    assert [row[-1] for row in proposed.rows] == ["2.5", "5"]
    made = runs_table([run_record(run, 3.5, d_model=64, num_layers=2, learning_rate=1e-3)])
    assert made.headers[3:] == ("d model", "layers", "learning rate", "cost so far", "loss")
    assert made.rows == (("6e+15", "1e+06", "1e+09", "64", "2", "0.001", "2.5", "3.5000"),)
