"""Tests of the reasons for which layouts cannot run."""

import dataclasses

import pytest

from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout
from paceline.core.runnable import Work, needs_mesh, require_runnable, unsupported_reasons
from paceline.core.specs import ModelShape

WORK = Work(
    shape=ModelShape(
        vocab_size=101, d_model=64, d_ff=90, num_layers=4, num_heads=8, num_kv_heads=4
    ),
    context_length=48,
)


@pytest.mark.parametrize(
    ("layout", "reasons"),
    [
        (ParallelLayout(tensor=2, context=2, pipeline=2, shard=2, sharding="parameters"), []),
        (ParallelLayout(shard=8, sharding="optimizer"), []),
        (ParallelLayout(replicate=2, activation_checkpointing="selective"), ["selective"]),
        (ParallelLayout(tensor=2, shard=2, sharding="optimizer"), ["ZeRO-1"]),
        (ParallelLayout(replicate=2, shard=2, sharding="optimizer"), ["ZeRO-1"]),
        (
            ParallelLayout(replicate=2, sharding="parameters"),
            ["replicate 2 leaves no ranks to shard parameters over; use replicate 1"],
        ),
        (ParallelLayout(replicate=2, context=2, sharding="parameters"), []),
        (ParallelLayout(tensor=3), ["8 heads", "4 key-value heads"]),
        (ParallelLayout(tensor=4), ["90 channels of the feed-forward"]),
        (ParallelLayout(tensor=8), ["4 key-value heads", "90 channels of the feed-forward"]),
        (ParallelLayout(context=5), ["context length divisible by 10, not 48"]),
        (
            ParallelLayout(pipeline=2, pipeline_interleave=3),
            ["need a block each, and the model has 4 layers"],
        ),
        (ParallelLayout(pipeline_interleave=2), ["interleave without a pipeline"]),
    ],
)
def test_reasons(layout: ParallelLayout, reasons: list[str]) -> None:
    found = unsupported_reasons(layout, WORK)
    assert len(found) == len(reasons)
    assert all(part in reason for part, reason in zip(reasons, found, strict=True))


def test_sequence_parallelism_splits_what_a_context_rank_has() -> None:
    shape = dataclasses.replace(WORK.shape, d_ff=96)
    work = dataclasses.replace(WORK, shape=shape)
    layout = ParallelLayout(tensor=4, context=8, sequence_parallel=True)
    assert unsupported_reasons(layout, work) == ["tensor 4 does not divide 6 tokens of a sequence"]
    assert not unsupported_reasons(dataclasses.replace(layout, sequence_parallel=False), work)


@pytest.mark.parametrize(
    ("passes", "interleave", "reason"),
    [
        (4, 1, None),
        (3, 1, None),
        (1, 1, "pipeline 2 needs at least as many micro-batches, and a step has 1"),
        (4, 2, None),
        (3, 2, "interleave 2 needs a multiple of 2 micro-batches, and a step has 3"),
    ],
)
def test_micro_batches_of_a_pipeline(passes: int, interleave: int, reason: str | None) -> None:
    layout = ParallelLayout(pipeline=2, pipeline_interleave=interleave)
    work = dataclasses.replace(WORK, num_micro_batches=passes)
    assert unsupported_reasons(layout, work) == ([] if reason is None else [reason])


def test_a_refusal_names_where_and_what_to_do() -> None:
    with pytest.raises(
        UsageError, match=r"plan.json: tensor 3 .*; paceline plan search --runnable"
    ):
        require_runnable(ParallelLayout(tensor=3), WORK, "plan.json")


def test_data_alone_needs_no_mesh() -> None:
    assert not needs_mesh(ParallelLayout(replicate=8))
    assert not needs_mesh(ParallelLayout(shard=8, sharding="parameters"))
    assert needs_mesh(ParallelLayout(replicate=2, shard=2, sharding="parameters"))
    assert needs_mesh(ParallelLayout(replicate=2, sharding="parameters"))
    assert needs_mesh(ParallelLayout(context=2))
