from hypothesis import given
from hypothesis import strategies as st

from paceline.core.plan import ParallelLayout
from paceline.predict.trainer_memory import backward_passes


def test_one_rank_keeps_one_micro_batch() -> None:
    passes = list(backward_passes(ParallelLayout(), 0, 3))
    assert [each.in_flight for each in passes] == [(1,)] * 3
    assert [any(each.finished) for each in passes] == [False, True, True]


def test_a_stage_keeps_as_many_micro_batches_as_there_are_stages_from_it_on() -> None:
    layout = ParallelLayout(pipeline=4)
    kept = [max(each.in_flight[0] for each in backward_passes(layout, r, 8)) for r in range(4)]
    assert kept == [4, 3, 2, 1]
    few = ParallelLayout(pipeline=4)
    assert max(each.in_flight[0] for each in backward_passes(few, 0, 2)) == 2


def test_with_several_stages_on_a_rank_the_first_has_more_in_flight() -> None:
    layout = ParallelLayout(pipeline=2, pipeline_interleave=2)
    first, *_ = backward_passes(layout, 0, 4)
    # Two micro-batches have passed both of its stages, a third only the first.
    assert (first.stage, first.in_flight) == (1, (3, 2))
    last, *_ = backward_passes(layout, 1, 4)
    assert (last.stage, last.in_flight) == (1, (2, 1))


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.data())
def test_every_micro_batch_goes_backward_through_every_stage_once(
    ranks: int, parts: int, rounds: int, data: st.DataObject
) -> None:
    layout = ParallelLayout(pipeline=ranks, pipeline_interleave=parts if ranks > 1 else 1)
    rank = data.draw(st.integers(0, ranks - 1))
    passes = list(backward_passes(layout, rank, rounds * ranks))
    stages = [each.stage for each in passes]
    for stage in range(layout.pipeline_interleave):
        assert stages.count(stage) == rounds * ranks
    for index, each in enumerate(passes):
        assert each.in_flight[each.stage] > 0
        assert min(each.in_flight) >= 0
        assert each.finished == tuple(map(stages[:index].count, range(len(each.in_flight))))
