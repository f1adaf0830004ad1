"""Tests of the coordinates of ranks on a mesh, without starting ranks."""

import itertools

import numpy as np

from paceline.core.plan import ParallelLayout
from paceline.parallel.mesh.layout import coordinates_of, describe
from paceline.predict.cost.layouts import AXES, Layouts

LAYOUT = ParallelLayout(
    pipeline=3, replicate=2, shard=2, context=2, tensor=4, sharding="parameters"
)


def test_ranks_are_numbered_as_the_planner_prices_them() -> None:
    layouts = Layouts.of([LAYOUT])
    for rank in range(LAYOUT.world_size):
        at = coordinates_of(rank, LAYOUT)
        assert rank == sum(getattr(at, axis) * np.ravel(layouts.stride(axis))[0] for axis in AXES)


def test_every_place_has_one_rank() -> None:
    places = {tuple(coordinates_of(rank, LAYOUT)) for rank in range(LAYOUT.world_size)}
    assert places == set(itertools.product(*map(range, (3, 2, 2, 2, 4))))


def test_a_layout_in_words() -> None:
    assert describe(LAYOUT) == "pipeline 3, replicate 2, shard 2, context 2, tensor 4"
    assert describe(ParallelLayout()) == "one rank"
    stages = ParallelLayout(pipeline=2, pipeline_interleave=3, tensor=2, sequence_parallel=True)
    assert describe(stages) == "pipeline 2, tensor 2, interleave 3, sequence parallel"
