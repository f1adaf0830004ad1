"""Pictures and tables of scaling laws, from sweeps whose truth is known."""

import pathlib

import pytest

from paceline.reports.plots.scaling import SCALING_PLOTS, plot_laws, plot_profiles
from paceline.reports.plots.style import save_figure
from paceline.reports.tables.scaling import methods_table, run_text, runs_table, waste_table
from paceline.scaling import CandidateRun, ScalingFit, SweepDesign, fit, synthetic_sweep
from paceline.scaling.allocation.decide import decide
from paceline.scaling.records import run_record
from tests.unit.scaling.surfaces import SURFACE


@pytest.fixture(scope="module")
def found() -> ScalingFit:
    return fit(synthetic_sweep(SURFACE, noise=0.003), num_draws=30)


def test_pictures_are_reproducible_and_drawn_without_minima_too(
    found: ScalingFit, tmp_path: pathlib.Path
) -> None:
    edge = fit(synthetic_sweep(SURFACE, SweepDesign(offset=0.1), noise=0.001), num_draws=10)
    for name, plot in SCALING_PLOTS.items():
        first, second = (
            [path.read_bytes() for path in save_figure(plot(found), tmp_path / folder, name)]
            for folder in ("first", "second")
        )
        assert min(map(len, first)) > 5000
        assert first == second
        plot(edge)


def test_laws_reach_1e24_and_show_every_method(found: ScalingFit) -> None:
    panels = plot_laws(found).axes
    assert all(axes.get_xlim()[1] >= 1e24 for axes in panels)
    labels = panels[0].get_legend_handles_labels()[1]
    assert labels == [method.method for method in found.methods]


def test_profiles_mark_each_minimum(found: ScalingFit) -> None:
    (axes,) = plot_profiles(found).axes
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert len(crosses) == len(found.profiles)


def test_tables_say_what_was_decided(found: ScalingFit) -> None:
    (decision,) = decide(found, [1e23])
    table = methods_table(found, [decision], 0.9)
    assert [row[1] for row in table.rows] == [method.method for method in found.methods]
    assert all(" to " in row[3] for row in table.rows)
    assert any("left out: envelope" in note for note in table.notes)
    assert "33.3 times" in table.caption
    assert len(waste_table(decision).rows) == 6
    assert f"{decision.run.parameters:,} parameters" in run_text(decision)


def test_runs_add_up_to_their_cost() -> None:
    run = CandidateRun(parameters=1e6, tokens=1e9, cost=2.5)
    proposed = runs_table([run_record(run), run_record(run)])
    assert proposed.headers == ("FLOPs", "parameters", "tokens", "cost so far")
    assert [row[-1] for row in proposed.rows] == ["2.5", "5"]
    made = runs_table([run_record(run, 3.5, d_model=64, num_layers=2, learning_rate=1e-3)])
    assert made.headers[3:] == ("d model", "layers", "learning rate", "cost so far", "loss")
    assert made.rows == (("6e+15", "1e+06", "1e+09", "64", "2", "0.001", "2.5", "3.5000"),)
