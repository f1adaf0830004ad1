import itertools

import numpy as np
import pytest

from paceline.accounting.memory.explain import StepPlan
from paceline.core import BatchShape, find_device, model_preset
from paceline.reports.plots.memory_plan import plot_memory_plan

PLAN = StepPlan(
    shape=model_preset("small"),
    batch=BatchShape(num_sequences=4, context_length=128),
    strategy="sharded",
)


def test_bars_are_stacked_to_the_totals_and_the_capacity_is_drawn() -> None:
    instants = PLAN.instants(2)
    device = find_device("rtx-3090")
    (axes,) = plot_memory_plan(instants, title="a step", device=device).axes
    assert len(axes.containers) == 5
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
    assert tops == pytest.approx([parts.total / 2**30 for parts in instants.values()])
    assert axes.get_ylabel() == "memory of one rank (GiB)"
    (line,) = axes.lines
    assert np.asarray(line.get_ydata())[0] == pytest.approx(24e9 / 2**30)
    assert "22.4 GiB (24 GB)" in str(line.get_label())
    assert axes.get_ylim()[1] > 24e9 / 2**30


def test_parts_are_told_apart_without_colour() -> None:
    (axes,) = plot_memory_plan(PLAN.instants(2), title="a step").axes
    hatches = [bars[0].get_hatch() for bars in axes.containers]
    assert len(hatches) == 5
    assert all(first != second for first, second in itertools.pairwise(hatches))
    assert not axes.lines
