"""Tests of the breakdown of a trace's time, against a check of every instant."""

import pathlib
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.ranges import BACKWARD, FORWARD, OPTIMIZER, WAIT, short_name, step_range
from paceline.traces.analysis import StepOverlap, TraceAnalysis, analyse_trace
from paceline.traces.catalog import FUNCTIONAL_WAIT, OpClass
from paceline.traces.operators import EVERYWHERE
from paceline.traces.overlap import INTERPRETER_PAUSE_NS
from tests.unit.traces.trace_files import Span, rank_name, write_trace

# All times are multiples of this unit: pauses of one or two units count as the interpreter's,
# longer ones do not.
UNIT_US = 200
_LONGEST_PAUSE = INTERPRETER_PAUSE_NS // (UNIT_US * 1000)

MAIN, OTHER, LINE = 1, 2, 3


def _span(
    category: str, name: str, start: int, end: int, thread: int = MAIN, rank: int = 0
) -> Span:
    return Span(category, name, start * UNIT_US, (end - start) * UNIT_US, thread, process=rank)


def _analyse(spans: list[Span]) -> TraceAnalysis:
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "trace.json"
        ranks = sorted({span.process for span in spans})
        return analyse_trace(write_trace(path, spans, *(rank_name(rank, rank) for rank in ranks)))


def _units(nanoseconds: int) -> float:
    return nanoseconds / (UNIT_US * 1000)


def _parts(step: StepOverlap) -> dict[str, float]:
    times = step.times
    assert step.compute + step.contention + times.exposed + times.idle == times.step
    return {
        "step": _units(times.step),
        "busy": _units(times.busy),
        "communication": _units(times.communication),
        "overlapped": _units(times.overlapped),
        "exposed": _units(times.exposed),
        "idle": _units(times.idle),
    }


def _cells(spans: list[Span], start: int, end: int) -> set[int]:
    cells = set()
    for span in spans:
        first = round(span.start / UNIT_US)
        cells |= set(range(first, first + round(span.duration / UNIT_US)))
    return cells & set(range(start, end))


def _is_range(span: Span) -> bool:
    is_annotation = span.category == "user_annotation" and not span.name.startswith("gloo:")
    return is_annotation or span.name == FUNCTIONAL_WAIT


def _operators(spans: list[Span], lines: set[int]) -> list[Span]:
    own = [span for span in spans if span.category == "cpu_op" and span.thread not in lines]
    return [span for span in own if span.name != FUNCTIONAL_WAIT]


def _expected(spans: list[Span], start: int, end: int) -> dict[str, float]:
    """Returns the parts of a single rank's step, by checking every instant."""
    touching = [
        span
        for span in spans
        if span.start < end * UNIT_US and span.start + max(span.duration, 0.001) > start * UNIT_US
    ]
    messages = [span for span in touching if span.name.startswith("gloo:")]
    lines = {span.thread for span in messages} - {
        span.thread for span in touching if _is_range(span)
    }
    work = _cells(_operators(touching, lines), start, end)
    waiting = _cells([span for span in touching if span.name == WAIT], start, end)
    work -= _cells([span for span in touching if span.name == FUNCTIONAL_WAIT], start, end)
    busy = set(work)
    for cell in work:
        pause = next(
            (length for length in range(_LONGEST_PAUSE + 1) if cell + 1 + length in work), 0
        )
        busy |= {cell + 1 + index for index in range(pause)} - waiting
    communicating = _cells(messages, start, end)
    return {
        "step": end - start,
        "busy": len(busy),
        "communication": len(communicating),
        "overlapped": len(busy & communicating),
        "exposed": len(communicating - busy),
        "idle": end - start - len(busy | communicating),
    }


_TIMES = st.tuples(st.integers(0, 60), st.integers(0, 15)).map(lambda pair: (pair[0], sum(pair)))
_EVENTS = st.lists(
    st.one_of(
        st.builds(
            lambda times, name, thread: _span("cpu_op", name, *times, thread),
            _TIMES,
            st.sampled_from(["aten::mm", "aten::add", "c", "d"]),
            st.sampled_from([MAIN, OTHER]),
        ),
        st.builds(lambda times: _span("user_annotation", "gloo:all_reduce", *times, LINE), _TIMES),
        st.builds(lambda times: _span("user_annotation", "gloo:send", *times, MAIN), _TIMES),
        st.builds(lambda times: _span("cpu_op", FUNCTIONAL_WAIT, *times), _TIMES),
        st.builds(lambda times: _span("user_annotation", WAIT, *times), _TIMES),
        st.builds(lambda times: _span("python_function", "noise", *times), _TIMES),
        st.builds(lambda times: _span("cpu_op", "of the line", *times, LINE), _TIMES),
    ),
    max_size=25,
)


@given(_EVENTS, st.integers(0, 30), st.integers(1, 40), st.integers(0, 3), st.integers(1, 30))
def test_steps_are_divided_as_by_looking_at_every_instant(
    events: list[Span], first_start: int, first_length: int, between: int, second_length: int
) -> None:
    windows = [(first_start, first_start + first_length)]
    windows.append((windows[0][1] + between, windows[0][1] + between + second_length))
    steps = [_span("user_annotation", step_range("label"), *window) for window in windows]
    # c10d's own operators only start a collective, and do not count as work.
    analysis = _analyse([*events, *steps, _span("cpu_op", "c10d::allreduce_", 0, 90)])
    assert [step.label for step in analysis.steps] == ["label", "label"]
    for step, window in zip(analysis.steps, windows, strict=True):
        assert _parts(step) == _expected([*events, *steps], *window)
        assert sum(_units(message.end - message.start) for message in step.times.messages) == sum(
            len(_cells([span], *window)) for span in events if span.name.startswith("gloo:")
        )


@given(_EVENTS)
def test_without_named_steps_all_of_a_trace_is_one(events: list[Span]) -> None:
    analysis = _analyse([*events, _span("cpu_op", "first", 0, 1)])
    end = max(
        [
            1,
            *(
                round((s.start + s.duration) / UNIT_US)
                for s in events
                if s.category != "python_function"
            ),
        ]
    )
    (step,) = analysis.steps
    assert _parts(step) == _expected([*events, _span("cpu_op", "first", 0, 1)], 0, end)


@given(_EVENTS, st.integers(0, 30), st.integers(0, 30))
def test_operators_are_counted_inside_of_ranges(
    events: list[Span], start: int, length: int
) -> None:
    spans = [
        *events,
        _span("user_annotation", step_range(""), 0, 80),
        _span("user_annotation", FORWARD, start, start + length),
    ]
    rows = _analyse(spans).operators
    has_message = any(span.name == "gloo:all_reduce" for span in events)
    for name in ("aten::mm", "aten::add", "of the line"):
        found = {row.range_name: row for row in rows if row.name == name}
        own = [
            span
            for span in events
            if span.name == name and not (has_message and span.thread == LINE)
        ]
        assert (found[EVERYWHERE].num_calls if EVERYWHERE in found else 0) == len(own)
        inside = [
            span for span in own if start * UNIT_US <= span.start < (start + length) * UNIT_US
        ]
        assert (found[short_name(FORWARD)].num_calls if short_name(FORWARD) in found else 0) == len(
            inside
        )
    everywhere = [row for row in rows if row.range_name == EVERYWHERE]
    busy = sum(
        len(_cells([s for s in _operators(events, set()) if s.thread == thread], 0, 80))
        for thread in ((MAIN, OTHER) if has_message else (MAIN, OTHER, LINE))
    )
    assert sum(_units(row.self_time) for row in everywhere) == busy


def test_products_are_counted_with_their_operations() -> None:
    spans = [
        _span("user_annotation", step_range(""), 0, 20),
        Span("cpu_op", "aten::linear", 0, 1000, input_dims=((5, 7), (3, 7))),
        Span("cpu_op", "aten::mm", 200, 600, input_dims=((5, 7), (7, 3))),
        Span("cpu_op", "aten::addmm", 1200, 600, input_dims=((3,), (5, 7), (7, 3))),
        Span("cpu_op", "aten::bmm", 2000, 600, input_dims=((2, 5, 7), (2, 7, 3))),
    ]
    rows = {row.name: row for row in _analyse(spans).operators if row.range_name == EVERYWHERE}
    assert {name: row.flops for name, row in rows.items()} == {
        "aten::linear": 0,
        "aten::mm": 210,
        "aten::addmm": 210,
        "aten::bmm": 420,
    }
    assert rows["aten::linear"].self_time == 400_000
    assert all(row.op_class == OpClass.MATMUL for row in rows.values())


def test_kernels_and_nccl_make_the_time_line_of_a_gpu() -> None:
    spans = [
        _span("user_annotation", step_range(""), 0, 20),
        _span("cpu_op", "aten::mm", 0, 18),
        _span("kernel", "sm80_xmma_gemm_f32f32", 2, 8, thread=7),
        _span(
            "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 6, 14, thread=20
        ),
        _span("gpu_memcpy", "Memcpy DtoD", 10, 11, thread=7),
        _span("user_annotation", FORWARD, 1, 3),
        _span("gpu_user_annotation", FORWARD, 2, 12, thread=7),
        _span("gpu_user_annotation", "nccl:all_reduce", 6, 14, thread=20),
    ]
    analysis = _analyse(spans)
    (step,) = analysis.steps
    assert _parts(step) == {
        "step": 20, "busy": 7, "communication": 8, "overlapped": 3, "exposed": 5, "idle": 8,
    }  # fmt: skip
    assert [(row.range_name, row.op_class) for row in analysis.operators] == [
        (short_name(FORWARD), OpClass.MATMUL),
        (EVERYWHERE, OpClass.MATMUL),
        (EVERYWHERE, OpClass.COPY),
    ]


def test_a_kernel_belongs_to_the_ranges_in_which_it_was_launched() -> None:
    products = ((5, 7), (7, 3))
    launched = {1: (1, MAIN, "aten::mm"), 2: (4, OTHER, "aten::mm"), 3: (8, MAIN, "aten::add_")}
    spans = [
        _span("user_annotation", step_range(""), 0, 40),
        _span("user_annotation", FORWARD, 0, 2),
        # A thread of autograd launches while the main thread waits in the range.
        _span("user_annotation", BACKWARD, 3, 6),
        _span("user_annotation", OPTIMIZER, 7, 10),
        _span("user_annotation", "Optimizer.step#SGD.step", 7, 10),
        *(
            Span(
                "cpu_op", name, start * UNIT_US, UNIT_US, thread, input_dims=products, operator=key
            )
            for key, (start, thread, name) in launched.items()
        ),
        # The device runs behind the host; its own ranges miss what inner ranges and threads launch.
        _span("gpu_user_annotation", BACKWARD, 12, 13, thread=7),
        *(
            Span("kernel", name, start * UNIT_US, length * UNIT_US, 7, operator=key)
            for name, key, start, length in (
                ("gemm forward", 1, 10, 2),
                ("memset", 2, 12, 1),
                ("gemm backward", 2, 14, 5),
                ("split-k of gemm", 2, 20, 3),
                ("multi_tensor_apply", 3, 24, 6),
                ("launched before the trace", 99, 30, 1),
                ("launched by nobody", "what", 31, 1),
            )
        ),
    ]
    analysis = _analyse(spans)
    (step,) = analysis.steps
    lasting = {short_name(s.name): (_units(s.start), _units(s.end)) for s in step.times.ranges}
    assert lasting.pop("step") == (10, 32)
    assert lasting == {
        "forward": (10, 12),
        "backward": (12, 23),
        "optimizer": (24, 30),
        "Optimizer.step#SGD.step": (24, 30),
    }
    found: dict[str, dict[str, int]] = {}
    for row in analysis.operators:
        found.setdefault(row.range_name, {})[row.name] = row.flops
    everything = found.pop(EVERYWHERE)
    assert len(everything) == 7
    # Of the kernels of one product, the longest counts as its matmul.
    of_optimizer = {"multi_tensor_apply": 0}
    assert found == {
        short_name(FORWARD): {"gemm forward": 210},
        short_name(BACKWARD): {"memset": 0, "gemm backward": 210, "split-k of gemm": 0},
        short_name(OPTIMIZER): of_optimizer,
        "Optimizer.step#SGD.step": of_optimizer,
    }


def test_what_an_operator_takes_longer_beside_communication_is_contention() -> None:
    dims = ((8, 8), (8, 8))
    spans = [
        Span("user_annotation", step_range("alone"), 0, 10_000),
        Span("cpu_op", "aten::mm", 1000, 2000, input_dims=dims),
        Span("cpu_op", "aten::mm", 3000, 4000, input_dims=((9, 9), (9, 9))),
        Span("user_annotation", step_range("beside"), 20_000, 10_000),
        Span("cpu_op", "aten::mm", 21_000, 2700, input_dims=dims),
        Span("cpu_op", "never seen alone", 24_000, 1000),
        Span("user_annotation", "gloo:all_reduce", 20_500, 5000, thread=LINE),
    ]
    alone, beside = _analyse(spans).steps
    assert (alone.contention, beside.contention) == (0, 700_000)
    assert beside.compute + 700_000 == beside.times.busy


def test_ranks_are_told_apart_and_the_profilers_steps_are_found() -> None:
    spans = [
        _span("user_annotation", f"ProfilerStep#{index}", 10 * index, 10 * index + 10, rank=rank)
        for rank in (0, 1)
        for index in (0, 1)
    ]
    spans += [_span("cpu_op", "x", 2, 5, rank=0), _span("cpu_op", "x", 12, 19, rank=1)]
    analysis = _analyse(spans)
    assert [(s.rank, s.index, _units(s.times.busy)) for s in analysis.steps] == [
        (0, 0, 3), (0, 1, 0), (1, 0, 0), (1, 1, 7),
    ]  # fmt: skip


def test_an_operator_over_the_border_counts_in_both_steps_and_is_called_once() -> None:
    spans = [
        _span("user_annotation", step_range(""), 0, 10),
        _span("user_annotation", step_range(""), 10, 20),
        _span("cpu_op", "x", 5, 12),
    ]
    analysis = _analyse(spans)
    assert [_units(step.times.busy) for step in analysis.steps] == [5, 2]
    assert [
        (row.num_calls, _units(row.self_time))
        for row in analysis.operators
        if row.range_name == EVERYWHERE
    ] == [(1, 7)]


def test_too_many_steps_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.traces.reader import TraceError

    monkeypatch.setattr("paceline.traces.analysis.MAX_STEPS", 3)
    spans = [_span("user_annotation", step_range(""), n, n + 1) for n in range(4)]
    with pytest.raises(TraceError, match="more than 3 steps"):
        analyse_trace(write_trace(tmp_path / "trace.json", spans))
