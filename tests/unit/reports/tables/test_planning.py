"""Tests of the table and the figure of predicted memory."""

import itertools

import numpy as np
import pytest

from paceline.accounting.memory.step import StepPlan
from paceline.core import BatchShape, find_device, model_preset
from paceline.core.strategies import StrategyName
from paceline.reports.plots.memory import plot_memory_plan
from paceline.reports.tables.planning import instants_text


def plan(strategy: StrategyName) -> StepPlan:
    batch = BatchShape(num_sequences=4, context_length=128)
    return StepPlan(shape=model_preset("small"), batch=batch, strategy=strategy)


def test_the_table_has_a_row_per_part_and_a_column_per_instant() -> None:
    lines = instants_text(plan("none").instants(1)).splitlines()
    assert lines[0].split("  ")[-1].strip() == "after step"
    parts = ["parameters", "gradients", "optimizer state", "buffers", "activations"]
    assert [line.split("  ")[0] for line in lines[1:]] == [*parts, "total"]
    assert lines[1].count("490.67 MiB") == 3


def test_bars_reach_the_totals_told_apart_without_colour_below_the_capacity() -> None:
    instants, device = plan("zero2").instants(2), find_device("rtx-3090")
    assert not plot_memory_plan(instants, title="a step").axes[0].lines
    (axes,) = plot_memory_plan(instants, title="a step", device=device).axes
    assert len(axes.containers) == 5
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
    assert tops == pytest.approx([parts.total / 2**30 for parts in instants.values()])
    hatches = [bars[0].get_hatch() for bars in axes.containers]
    assert all(first != second for first, second in itertools.pairwise(hatches))
    assert axes.get_ylabel() == "memory of one rank (GiB)"
    (line,) = axes.lines
    assert np.asarray(line.get_ydata())[0] == pytest.approx(24e9 / 2**30)
    assert "22.4 GiB (24 GB)" in str(line.get_label())
    assert axes.get_ylim()[1] > 24e9 / 2**30
