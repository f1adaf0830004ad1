import pytest

from paceline.benchmarks.config import LayoutSweep, parse_layout
from paceline.core import UsageError


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("", "micro=1"),
        ("pipeline=2", "pipeline=2,micro=1"),
        ("micro=4,pipeline=2,interleave=2", "pipeline=2,interleave=2,micro=4"),
        ("shard=2", "shard=2,zero=3,micro=1"),
        ("shard=4,zero=2,replicate=2", "replicate=2,shard=4,zero=2,micro=1"),
        ("tensor=2,sp=1,context=2", "context=2,tensor=2,sp=1,micro=1"),
    ],
)
def test_a_layout_is_written_in_one_way(text: str, written: str) -> None:
    assert parse_layout(text).text == written
    assert parse_layout(written) == parse_layout(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipline=2", "'pipline=2' is not one of replicate"),
        ("pipeline", "'pipeline' is not one of replicate"),
        ("tensor=-2", "'tensor=-2' is not one of"),
        ("tensor=0", "ParallelLayout.tensor is 0"),
        ("shard=2,zero=0", "set sharding to what is sharded"),
        ("shard=2,zero=4", "zero=4 is not a ZeRO stage"),
        ("pipeline=2,micro=0", "micro=0 has no sequences; use 1 or more"),
        ("tensor=2,micro=1,tensor=4", "tensor is given twice; leave one of them out"),
    ],
)
def test_a_mistake_in_a_layout_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_layout(text)


def test_layouts_of_one_sweep_have_as_many_ranks() -> None:
    with pytest.raises(UsageError, match=r"pipeline=4,micro=1 has 4"):
        LayoutSweep(layouts=("pipeline=2", "pipeline=4"))
    with pytest.raises(UsageError, match="--world-size is 4"):
        LayoutSweep(layouts=("pipeline=2",), world_size=4)


def test_what_cannot_run_is_refused_before_ranks_start() -> None:
    sweep = LayoutSweep(layouts=("pipeline=2,micro=8",), batch_size=8)
    with pytest.raises(UsageError, match="pipeline=2,micro=8: pipeline 2 needs at least as many"):
        list(sweep.cases())
    sweep = LayoutSweep(layouts=("replicate=2,micro=3",), batch_size=8)
    with pytest.raises(UsageError, match="--batch-size 8 is not divisible by the 6 sequences"):
        list(sweep.cases())


def test_a_case_has_all_layouts_and_cuts_the_same_batch() -> None:
    (case,) = LayoutSweep(layouts=("replicate=2,micro=2", "pipeline=2,micro=1")).cases()
    assert [case.num_micro_batches(written) for written in case.layouts] == [2, 8]
