"""What is said of collectives is true of the figures, on processors, links and GPUs."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from paceline.accounting.communication.collectives import bus_factor
from paceline.course.answers import collectives as answers_communication
from paceline.course.answers.collectives import answer_all_reduce
from paceline.records import Metric, Record, find_kind
from paceline.reports.evidence.groups import Evidence
from paceline.reports.plots.collectives import plot_communication
from tests.unit.course.report_cases import no_drawing, sentences
from tests.unit.reports.factory import ENVIRONMENT

LAB = {"num_hosts": 2, "link_rate_bits_per_s": 8e9}
UNSHAPED = {"num_hosts": 2, "measured_link_rate_bits_per_s": 2e10}
GPU = {"device": "cuda", "hardware": "h100-sxm", "backend": "nccl"}


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_communication, "draw_picture", no_drawing)


def _case(kind: str, **case: Any) -> dict[str, Any]:
    usual: dict[str, Any] = dict.fromkeys(find_kind(kind).join_key, "x")
    usual |= {"operation": "all_reduce", "world_size": 2, "num_hosts": 1, "threads": 1}
    return usual | {"device": "cpu", "hardware": "a processor"} | case


def _comm(size: int, *, bus: float = 1e9, **case: Any) -> Record:
    """An all-reduce with a bus bandwidth; one rank has none and takes a millisecond."""
    fields = _case("comm", size_bytes=size, **case)
    factor = float(bus_factor("all_reduce", fields["world_size"]))
    seconds = size * factor / bus or 1e-3
    metrics = {
        "time_s": Metric.from_samples([seconds]),
        "algorithm_bandwidth_bytes_per_s": Metric(value=size / seconds),
        "bus_bandwidth_bytes_per_s": Metric(value=size / seconds * factor),
    }
    return Record(kind="comm", case=fields, environment=ENVIRONMENT, metrics=metrics, outcome="ok")


def _fit(latency_s: float, **case: Any) -> Record:
    sizes = {"smallest_bytes": 1_000_000.0, "largest_bytes": 100_000_000.0}
    return Record(
        kind="collective_fit",
        case=_case("collective_fit", **{**sizes, **case}),
        environment=ENVIRONMENT,
        metrics={"latency_s": Metric(value=latency_s), "max_relative_error": Metric(value=0.0)},
        outcome="ok",
    )


def _check(records: Sequence[Record], must: Sequence[str], must_not: Sequence[str]) -> None:
    text = " ".join(sentences(answer_all_reduce(Evidence.of(records))))
    for part in must:
        assert part in text
    for part in must_not:
        assert part not in text


@pytest.mark.parametrize(
    ("fit", "must", "must_not"),
    [
        # A megabyte takes a millisecond.
        (_fit(8e-4), ["800 µs", "80%", "calls dominate small messages"], ["costs little"]),
        (_fit(2.4e-4), ["24%", "dividing them is not free"], ["costs little", "costs nothing"]),
        (_fit(5e-5), ["5% of the time of 1 MB", "costs little"], ["not free", "costs nothing"]),
        (_fit(0.0), ["less than 1% of the time", "costs little"], ["not free"]),
        # Fits of other ranks, sizes or machines say nothing of these.
        (_fit(8e-4, world_size=4), ["about as long in either"], ["by the fit"]),
        (_fit(8e-4, threads=2), ["about as long in either"], ["by the fit"]),
        (_fit(8e-4, hardware="another"), ["about as long in either"], ["by the fit"]),
        (_fit(8e-4, smallest_bytes=1e7), ["about as long in either"], ["by the fit"]),
    ],
)
def test_what_a_call_takes_is_told_by_the_fit(
    fit: Record, must: list[str], must_not: list[str]
) -> None:
    sizes = [_comm(1_000_000), _comm(100_000_000), _comm(10_000_000, world_size=4)]
    _check([*sizes, fit], must, must_not)


@pytest.mark.parametrize(
    ("small", "must", "must_not"),
    [
        (0.5e9, ["a byte takes longer in small messages, so few large"], ["in either"]),
        (2e9, ["a byte takes longer in large messages"], ["few large ones"]),
        (1.1e9, ["a byte takes about as long in either"], ["longer in", "costs nothing"]),
    ],
)
def test_without_a_fit_only_the_bandwidths_speak(
    small: float, must: list[str], must_not: list[str]
) -> None:
    _check([_comm(1_000_000, bus=small), _comm(100_000_000)], must, must_not)


@pytest.mark.parametrize(
    ("bus", "must", "must_not"),
    [
        (0.95e9, ["of 10 MB", "about constant", "1.5 times as many bytes"], ["lower", "higher"]),
        (0.5e9, ["from 1 GB/s to 500 MB/s, lower"], ["about constant", "higher"]),
        (2e9, ["from 1 GB/s to 2 GB/s, higher"], ["about constant", "lower"]),
    ],
)
def test_ranks_are_compared_at_a_size_that_both_have(
    bus: float, must: list[str], must_not: list[str]
) -> None:
    records = [_comm(size) for size in (1_000_000, 10_000_000)]
    records += [_comm(size, bus=bus, world_size=4) for size in (10_000_000, 100_000_000)]
    _check(records, ["From 2 to 4 ranks", *must], must_not)


def test_ranks_without_a_size_in_common_are_not_compared() -> None:
    records = [_comm(1_000_000), _comm(10_000_000), _comm(100_000_000, world_size=4)]
    _check(records, ["On 2 ranks 1 MB"], ["From 2 to 4 ranks"])


@pytest.mark.parametrize(
    ("processors", "case", "said"), [(2, {}, True), (8, {}, False), (2, {"num_hosts": 4}, False)]
)
def test_processors_are_shared_only_where_there_are_fewer_than_ranks(
    processors: int, case: dict[str, Any], said: bool
) -> None:
    environment = msgspec.structs.replace(ENVIRONMENT, num_processors=processors)
    records = [
        msgspec.structs.replace(
            _comm(size, bus=1e9 if ranks == 2 else 1e8, world_size=ranks, **case),
            environment=environment,
        )
        for ranks in (2, 4)
        for size in (1_000_000, 10_000_000)
    ]
    share = "4 ranks share 2 processors" if said else "lower"
    _check(records, [share], [] if said else ["ranks share"])


def test_threads_are_not_mixed() -> None:
    records = [
        *(_comm(size, threads=1) for size in (1_000_000, 10_000_000)),
        _comm(100_000_000, bus=1e6, threads=2),
    ]
    _check(records, ["bus bandwidth is 1 GB/s at either"], ["100 MB"])


@pytest.mark.parametrize(
    ("case", "bus", "must", "must_not"),
    [
        ({}, 1e9, ["what processors copy and add"], ["not known"]),
        (UNSHAPED, 1e9, ["rate is not known", "stream reached 20 Gbit/s"], ["processors"]),
        ({"num_hosts": 2}, 1e9, ["rate is not known here, so"], ["processors", "stream"]),
        ({**GPU, "num_hosts": 2}, 1e9, ["rate is not known"], ["processors"]),
        ({**GPU, "hardware": "some GPU"}, 1e9, ["rate is not known"], ["processors"]),
        (GPU, 4.4e11, ["of the 450 GB/s", "NVLink 4", "the line bounds it"], ["not known"]),
        (GPU, 4.8e11, ["106.7%", "something other than this line"], ["is wrong", "bounds it"]),
        (GPU, 4.6e11, ["102.2%", "the line bounds it"], ["something other"]),
        (LAB, 0.5e9, ["50.0%", "links shaped to 8 Gbit/s", "something else"], ["the line bounds"]),
    ],
)
def test_throughput_is_held_against_a_line_whose_rate_is_known(
    case: dict[str, Any], bus: float, must: list[str], must_not: list[str]
) -> None:
    _check([_comm(size, bus=bus, **case) for size in (1_000_000, 10_000_000)], must, must_not)


@pytest.mark.parametrize("case", [{}, GPU])
def test_one_rank_tells_nothing(case: dict[str, Any]) -> None:
    alone = [_comm(size, world_size=1, **case) for size in (1_000_000, 10_000_000)]
    assert answer_all_reduce(Evidence.of(alone)) == ()
    both = [*alone, *(_comm(size, bus=4e11, **case) for size in (1_000_000, 10_000_000))]
    _check(both, ["On 2 ranks"], ["On 1 ranks", "From 1"])


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ({}, "loopback: no line rate, so no theoretical curve"),
        (UNSHAPED, "no line rate is known, so no theoretical curve"),
        ({**GPU, "num_hosts": 2}, "no line rate is known, so no theoretical curve"),
        (LAB, None),
        (GPU, None),
        ({**GPU, "world_size": 1}, None),
    ],
)
def test_the_picture_says_why_it_has_no_curve(case: dict[str, Any], text: str | None) -> None:
    figure = plot_communication([_comm(size, **case) for size in (1_000_000, 10_000_000)])
    texts = [each.get_text() for each in figure.axes[0].texts]
    assert texts == ([] if text is None else [text])
    lines = [str(line.get_label()) for line in figure.axes[0].lines]
    has_line = case in (LAB, GPU)
    assert any(label.endswith("line rate") for label in lines) == has_line
