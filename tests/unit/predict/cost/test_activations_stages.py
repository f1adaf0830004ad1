import numpy as np
import pytest

from paceline.accounting.counts import count_parameters
from paceline.core.plan import ParallelLayout
from paceline.core.presets import model_preset
from paceline.core.specs import Precision
from paceline.predict.cost.activations import stage_loads
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory import layout_memory

_SHAPE = model_preset("bytes-6M")


def test_the_fullest_ranks_are_those_of_the_trainers_stages() -> None:
    counted = count_parameters(_SHAPE)
    loads = stage_loads(_SHAPE, 128, np.array([1, 4, 2, 4]), np.array([1, 1, 2, 1]))
    block = (counted.total - counted.embedding - counted.head) / 6
    # Four ranks have 1, 2, 2 and 1 blocks; two ranks with two stages each have 1 + 2 and 2 + 1.
    expected = [counted.total, 2 * block, 3 * block + counted.embedding, 2 * block]
    assert loads.parameters == pytest.approx(expected)
    assert list(loads.in_flight) == [6, 6, 6, 6]
    assert list(loads.last) == [6, 1, 3, 1]


def test_more_stages_than_blocks_are_as_many_as_there_are_blocks() -> None:
    many = stage_loads(_SHAPE, 128, np.array([8, 4]), np.array([1, 3]))
    few = stage_loads(_SHAPE, 128, np.array([6, 4]), np.array([1, 1]))
    np.testing.assert_array_equal(many, few)


def test_memory_of_what_our_trainer_runs_has_its_stages() -> None:
    workload = Workload(
        shape=_SHAPE,
        precision=Precision(),
        context_length=128,
        micro_batch=1,
        num_micro_batches=8,
        trainer_stages=True,
    )
    layouts = Layouts.of([ParallelLayout(pipeline=4)])
    (parameters,) = layout_memory(layouts, workload).states.parameters
    loads = stage_loads(_SHAPE, 128, layouts.pipeline, layouts.pipeline_interleave)
    assert parameters == 4 * loads.parameters
