import pathlib

import msgspec
import pytest

from paceline.core.ranges import PipelineRange, pipeline_range, step_range
from paceline.traces.analysis import analyse_trace
from paceline.traces.pipeline import pipeline_steps
from paceline.traces.reader import TraceError
from tests.unit.traces.trace_files import Span, rank_name, write_trace


def _one_forward_one_backward(
    num_micro_batches: int, message_us: float, slower: float = 1.0
) -> list[Span]:
    """Returns 1F1B on two ranks: 1000 us forward, 2000 us backward, times `slower` on the last."""
    spans = []
    orders = {0: ["forward 0"], 1: []}
    for number in range(num_micro_batches):
        if number + 1 < num_micro_batches:
            orders[0].append(f"forward {number + 1}")
        orders[0].append(f"backward {number}")
        orders[1] += [f"forward {number}", f"backward {number}"]
    free = {0: 0.0, 1: 0.0}
    ended: dict[tuple[str, int, int], float] = {}
    waiting = {rank: list(order) for rank, order in orders.items()}
    while any(waiting.values()):
        for rank, order in waiting.items():
            if not order:
                continue
            phase, number = order[0].split()
            needed = (phase, 0 if phase == "forward" else 1, int(number))
            is_fed = (phase == "forward") == (rank == 0)
            if not is_fed and needed not in ended:
                continue
            order.pop(0)
            start = free[rank] if is_fed else max(free[rank], ended[needed] + message_us)
            duration = (1000.0 if phase == "forward" else 2000.0) * (slower if rank else 1.0)
            name = PipelineRange(phase, rank, int(number)).name
            spans.append(Span("user_annotation", name, start, duration, process=rank))
            free[rank] = start + duration
            ended[phase, rank, int(number)] = free[rank]
    for rank in (0, 1):
        whole = Span("user_annotation", step_range("pipeline"), 0, max(free.values()), process=rank)
        spans.append(whole)
    return spans


@pytest.mark.parametrize("num_micro_batches", [2, 4, 8])
def test_without_messages_the_bubble_is_that_of_the_schedule(
    tmp_path: pathlib.Path, num_micro_batches: int
) -> None:
    spans = _one_forward_one_backward(num_micro_batches, message_us=0)
    trace = write_trace(tmp_path / "trace.json", spans, rank_name(0, 0), rank_name(1, 1))
    (step,) = pipeline_steps(analyse_trace(trace).steps, {0, 1})
    assert step.ranks == (0, 1)
    assert step.label == "pipeline"
    assert step.work_s == pytest.approx(2 * num_micro_batches * 3e-3)
    assert step.idle == pytest.approx(1 / num_micro_batches)
    assert step.order_bubble == pytest.approx(1 / num_micro_batches)
    assert step.imbalance == pytest.approx(0)
    assert step.messages == pytest.approx(0)
    assert step.bubble == pytest.approx(1 / num_micro_batches)


def test_what_messages_take_is_told_from_the_bubble(tmp_path: pathlib.Path) -> None:
    spans = _one_forward_one_backward(4, message_us=300)
    trace = write_trace(tmp_path / "trace.json", spans, rank_name(0, 0), rank_name(1, 1))
    (step,) = pipeline_steps(analyse_trace(trace).steps, {0, 1})
    assert step.order_bubble == pytest.approx(1 / 4)
    assert step.imbalance == pytest.approx(0)
    assert step.messages >= 2 * 2 * 300e-6 / step.work_s
    assert step.bubble == pytest.approx(1 / 4 + step.messages)


def test_a_slower_stage_is_told_from_the_bubble(tmp_path: pathlib.Path) -> None:
    spans = _one_forward_one_backward(8, message_us=0, slower=1.5)
    trace = write_trace(tmp_path / "trace.json", spans, rank_name(0, 0), rank_name(1, 1))
    (step,) = pipeline_steps(analyse_trace(trace).steps, {0, 1})
    assert step.order_bubble == pytest.approx(1 / 8)
    # The slower rank works from the end of the first forward to the start of the last backward.
    assert step.idle == pytest.approx(2 * (8 * 4.5 + 3) / (8 * 7.5) - 1)
    assert step.imbalance == pytest.approx(step.idle - 1 / 8)
    assert step.messages == pytest.approx(0)
    assert step.bubble == pytest.approx(1 / 8)


def test_clocks_that_differ_are_named(tmp_path: pathlib.Path) -> None:
    spans = [
        msgspec.structs.replace(span, start=span.start + (20_000 if span.process == 0 else 0))
        for span in _one_forward_one_backward(2, message_us=0)
    ]
    trace = write_trace(tmp_path / "trace.json", spans, rank_name(0, 0), rank_name(1, 1))
    (step,) = pipeline_steps(analyse_trace(trace).steps, {0, 1})
    with pytest.raises(
        TraceError, match=r"rank 1 begins pipeline/forward/1/0 before pipeline/forward/0/0"
    ):
        _ = step.bubble


def test_other_pipelines_and_other_ranges_are_left_out(tmp_path: pathlib.Path) -> None:
    spans = _one_forward_one_backward(2, message_us=0)
    others = [
        Span(s.category, s.name, s.start, 2 * s.duration, process=s.process + 2) for s in spans
    ]
    names = [rank_name(rank, rank) for rank in range(4)]
    trace = write_trace(tmp_path / "trace.json", [*spans, *others], *names)
    (step,) = pipeline_steps(analyse_trace(trace).steps, {0, 1})
    assert step.ranks == (0, 1)
    assert step.duration_s == pytest.approx(9e-3)


@pytest.mark.parametrize("phase", ["forward", "backward", "weights"])
def test_a_range_says_whose_work_it_is(phase: str) -> None:
    what = PipelineRange(phase, 12, 7)
    assert pipeline_range(what.name) == what


def test_ranges_of_the_loss_and_of_others() -> None:
    loss = PipelineRange("loss", 3, None)
    assert pipeline_range(loss.name) == loss
    for name in ("paceline::forward", "paceline::pipeline/forward", "paceline::pipeline/x/1/2/3"):
        assert pipeline_range(name) is None
