"""Tests that candidates divide evenly, occur once, and are complete."""

import dataclasses
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import ModelShape
from paceline.core.runnable import Work, unsupported_reasons
from paceline.planner.calibrations.framework_settings import FrameworkSettings
from paceline.planner.search.candidates import Candidates, candidate_chunks, candidates_of, divisors
from paceline.planner.search.search import layout_at
from paceline.planner.search.spec import SearchSpec
from tests.unit.planner.search.search_cases import oracle, spec


@st.composite
def questions(draw: st.DrawFn) -> SearchSpec:
    heads = draw(st.sampled_from([4, 6, 8]))
    shape = ModelShape(
        vocab_size=100,
        d_model=heads * 16,
        d_ff=draw(st.sampled_from([96, 192, 200])),
        num_layers=draw(st.integers(1, 10)),
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([1, 2, heads])),
    )
    return spec(
        shape=shape,
        context_length=draw(st.sampled_from([32, 48, 64])),
        global_batch=draw(st.integers(1, 24)),
        num_devices=draw(st.integers(1, 40)),
        devices_per_host=draw(st.sampled_from([1, 4, 8])),
        runnable=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(questions())
def test_every_candidate_divides(asked: SearchSpec) -> None:
    shape = asked.shape
    for chunk in candidate_chunks(asked, chunk=500):
        layouts = chunk.layouts
        data = layouts.replicate * layouts.shard
        for number in (shape.num_heads, shape.key_value_heads, shape.d_ff):
            assert not (number % layouts.tensor).any()
        parts = layouts.pipeline * layouts.pipeline_interleave
        layers = shape.num_layers
        assert ((layers % parts == 0) | ((layers + 2) % parts == 0)).all()
        assert (data * chunk.micro_batch * chunk.num_micro_batches == asked.global_batch).all()
        in_parts = np.where(layouts.context > 1, 2 * layouts.context, 1)
        assert not (asked.context_length % in_parts).any()
        split = np.where(layouts.sequence_parallel, layouts.tensor, 1)
        assert not (asked.context_length // layouts.context % split).any()
        assert (chunk.num_devices <= asked.num_devices).all()
        assert (chunk.num_devices >= asked.least_used * asked.num_devices).all()
        assert ((layouts.stage > 0) == (layouts.shard > 1)).all()
        in_rounds = (layouts.pipeline_interleave == 1) | (
            chunk.num_micro_batches % layouts.pipeline == 0
        )
        assert in_rounds.all()
        if asked.runnable:
            assert not any(_is_refused(chunk, place, asked) for place in range(len(chunk)))


def _is_refused(chunk: Candidates, place: int, asked: SearchSpec) -> bool:
    work = Work(
        shape=asked.shape,
        context_length=asked.context_length,
        num_micro_batches=int(chunk.num_micro_batches[place]),
    )
    return bool(unsupported_reasons(layout_at(chunk, place), work))


@settings(max_examples=10, deadline=None)
@given(questions())
def test_all_that_runs_is_there(asked: SearchSpec) -> None:
    every = dataclasses.replace(asked, runnable=False)
    expected = sum(
        not _is_refused(chunk, place, asked)
        for chunk in candidate_chunks(every)
        for place in range(len(chunk))
    )
    runnable = dataclasses.replace(asked, runnable=True)
    assert sum(len(chunk) for chunk in candidate_chunks(runnable)) == expected


@settings(max_examples=15, deadline=None)
@given(questions())
def test_each_comes_once(asked: SearchSpec) -> None:
    chunks = [chunk.columns for chunk in candidate_chunks(asked, chunk=700)]
    if chunks:
        columns = np.concatenate(chunks, axis=1)
        assert len(np.unique(columns, axis=1).T) == columns.shape[1]


def test_none_that_divides_is_missing() -> None:
    asked = spec(num_devices=4, global_batch=4)
    found = sum(len(chunk) for chunk in candidate_chunks(asked))
    assert found == sum(1 for _ in oracle(asked))
    assert found > 100


def test_columns_make_the_same_candidates_again() -> None:
    asked = spec()
    chunk = next(candidate_chunks(asked))
    again = candidates_of(chunk.columns, asked)
    assert (again.columns == chunk.columns).all()
    assert again.layouts.sequence_parallel.dtype == np.bool_
    assert len(chunk.take(np.array([0, 2]))) == 2


def test_what_is_given_is_not_searched() -> None:
    asked = spec(fixed={"tensor": 2, "checkpointing": 2, "micro_batch": 1})
    chunks = list(candidate_chunks(asked))
    assert chunks
    for chunk in chunks:
        assert (chunk.layouts.tensor == 2).all()
        assert (chunk.layouts.checkpointing == 2).all()
        assert (chunk.micro_batch == 1).all()


def test_context_ranks_share_states_where_the_framework_shards_over_them() -> None:
    asked = spec(framework_settings=FrameworkSettings(shards_context=True))
    chunks = list(candidate_chunks(asked))
    alone = [chunk.take((chunk.layouts.shard == 1) & (chunk.layouts.stage > 0)) for chunk in chunks]
    assert sum(map(len, alone)) > 0
    assert all((each.layouts.context > 1).all() for each in alone)
    assert all(each.layouts.shards_context for each in alone)


def test_divisors() -> None:
    for number in (1, 2, 36, 97, 2048):
        expected = [each for each in range(1, number + 1) if number % each == 0]
        assert list(divisors(number)) == expected
    assert math.prod(divisors(6)) == 36
