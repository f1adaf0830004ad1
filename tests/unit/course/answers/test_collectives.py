"""Findings in collectives follow from the records, on processors, links and GPUs."""

from typing import Any

import msgspec
import pytest

from paceline.accounting.communication.collectives import bus_factor
from paceline.course.answers import collectives
from paceline.course.answers.collectives import answer_all_reduce
from paceline.records import Record
from paceline.reports.evidence.groups import Evidence
from paceline.reports.plots.collectives import plot_communication
from tests.unit.course.report_cases import check, make_record, no_drawing
from tests.unit.record_factory import ENVIRONMENT

LAB = {"num_hosts": 2, "link_rate_bits_per_s": 8e9}
UNSHAPED = {"num_hosts": 2, "measured_link_rate_bits_per_s": 2e10}
GPU = {"device": "cuda", "hardware": "h100-sxm", "backend": "nccl"}
MB = 1_000_000


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "draw_picture", no_drawing)


def _comm(size: int, *, bus: float = 1e9, **case: Any) -> Record:
    """An all-reduce with a bus bandwidth; one rank has none and takes a millisecond."""
    factor = float(bus_factor("all_reduce", case.get("world_size", 2)))
    seconds = size * factor / bus or 1e-3
    metrics = {
        "time_s": seconds,
        "algorithm_bandwidth_bytes_per_s": size / seconds,
        "bus_bandwidth_bytes_per_s": size / seconds * factor,
    }
    return make_record("comm", metrics, operation="all_reduce", size_bytes=size, **case)


def _fit(latency_s: float, **case: Any) -> Record:
    metrics = {"latency_s": latency_s, "max_relative_error": 0.05}
    sizes = {"smallest_bytes": 1.0 * MB, "largest_bytes": 100.0 * MB, "operation": "all_reduce"}
    return make_record("collective_fit", metrics, **{**sizes, **case})


@pytest.mark.parametrize(
    ("fit", "figures"),
    [
        # A megabyte takes a millisecond.
        (_fit(8e-4), {"latency_s": 8e-4, "latency_share": 0.8, "error_share": 0.05}),
        (_fit(2e-3), {"latency_share": 1.0}),
        (_fit(0.0), {"latency_s": 0.0, "latency_share": 0.0}),
        # Fits of other ranks, sizes or machines say nothing of these.
        (_fit(8e-4, world_size=4), None),
        (_fit(8e-4, threads=2), None),
        (_fit(8e-4, hardware="another"), None),
        (_fit(8e-4, smallest_bytes=1e7), None),
    ],
)
def test_the_latency_of_a_call_is_told_by_the_fit(
    fit: Record, figures: dict[str, float] | None
) -> None:
    records = [_comm(MB), _comm(100 * MB), _comm(10 * MB, world_size=4), fit]
    check(answer_all_reduce(Evidence.of(records)), {"call_latency": figures})


@pytest.mark.parametrize(
    ("small", "says"),
    [
        (0.5e9, ("more (+100%)", "few large")),
        (2e9, "less (-50%)"),
        (1.09e9, "alike (-8%)"),
        (0.92e9, "alike (+9%)"),
    ],
)
def test_bandwidth_is_compared_by_size(small: float, says: Any) -> None:
    records = [
        *(_comm(MB, bus=small), _comm(100 * MB)),
        # Of other threads, and so no part of the curve.
        _comm(200 * MB, bus=1e6, threads=2),
    ]
    figures = {"small_s": MB / small, "large_s": 0.1, "large_bytes_per_s": 1e9}
    expected = {**figures, "small_bytes_per_s": small, "says": says}
    check(answer_all_reduce(Evidence.of(records)), {"bandwidth_by_size": expected})


@pytest.mark.parametrize(
    ("bus", "processors", "case", "figures"),
    [
        (0.95e9, 2, {}, {"many_bytes_per_s": 0.95e9, "says": ("of 10 MB", "alike (-5%)")}),
        (0.5e9, 2, {}, {"few_bytes_per_s": 1e9, "says": ("less", "4 ranks share 2 processors")}),
        (0.5e9, 8, {}, {"says": "less", "remedy": ""}),
        (2e9, 2, {"num_hosts": 4}, {"few_ranks": 2, "many_ranks": 4, "says": "more"}),
    ],
)
def test_ranks_are_compared_at_a_size_that_both_have(
    bus: float, processors: int, case: dict[str, Any], figures: dict[str, Any]
) -> None:
    records = [_comm(size, **case) for size in (MB, 10 * MB)]
    records += [_comm(size, bus=bus, world_size=4, **case) for size in (10 * MB, 100 * MB)]
    environment = msgspec.structs.replace(ENVIRONMENT, num_processors=processors)
    there = [msgspec.structs.replace(record, environment=environment) for record in records]
    check(answer_all_reduce(Evidence.of(there)), {"bandwidth_by_ranks": figures})


def test_ranks_without_a_size_in_common_are_not_compared() -> None:
    records = [_comm(MB), _comm(10 * MB), _comm(100 * MB, world_size=4)]
    expected = {"bandwidth_by_size": {"world_size": 2}, "bandwidth_by_ranks": None}
    check(answer_all_reduce(Evidence.of(records)), expected)


@pytest.mark.parametrize(
    ("case", "bus", "finding", "figures"),
    [
        ({}, 1e9, "loopback", {"bus_bytes_per_s": 1e9}),
        (UNSHAPED, 1e9, "unknown_link", {"says": "stream reached 20 Gbit/s"}),
        ({"num_hosts": 2}, 1e9, "unknown_link", {"bus_bytes_per_s": 1e9}),
        ({**GPU, "num_hosts": 2}, 1e9, "unknown_link", {}),
        ({**GPU, "hardware": "some GPU"}, 1e9, "unknown_link", {}),
        (GPU, 4.4e11, "link_share", {"link_share": 0.978, "says": ("NVLink 4", "link bounds it")}),
        (GPU, 5.1e11, "link_share", {"link_share": 1.133, "says": "other than this link"}),
        (LAB, 0.5e9, "link_share", {"link_share": 0.5, "says": "links shaped to 8 Gbit/s"}),
        ({**LAB, "world_size": 4}, 0.5e9, "link_share", {"bus_bytes_per_s": 0.5e9}),
    ],
)
def test_throughput_is_held_against_a_link_whose_rate_is_known(
    case: dict[str, Any], bus: float, finding: str, figures: dict[str, Any]
) -> None:
    records = [_comm(size, bus=bus, **case) for size in (MB, 10 * MB)]
    others = {"loopback", "unknown_link", "link_share"} - {finding}
    check(answer_all_reduce(Evidence.of(records)), {finding: figures, **dict.fromkeys(others)})


@pytest.mark.parametrize("case", [{}, GPU])
def test_one_rank_tells_nothing(case: dict[str, Any]) -> None:
    alone = [_comm(size, world_size=1, **case) for size in (MB, 10 * MB)]
    assert answer_all_reduce(Evidence.of(alone)) == ()
    both = [*alone, *(_comm(size, bus=4e11, **case) for size in (MB, 10 * MB))]
    expected = {"bandwidth_by_size": {"world_size": 2}, "bandwidth_by_ranks": None}
    check(answer_all_reduce(Evidence.of(both)), expected)


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
    figure = plot_communication([_comm(size, **case) for size in (MB, 10 * MB)])
    assert [each.get_text() for each in figure.axes[0].texts] == ([] if text is None else [text])
    labels = [str(line.get_label()) for line in figure.axes[0].lines]
    assert any(label.endswith("line rate") for label in labels) == (case in (LAB, GPU))
