"""Tests that findings about collectives follow from the records, on CPUs, links and GPUs."""

from typing import Any

import msgspec
import pytest

from paceline.accounting.collectives import bus_factor
from paceline.course.answers.collectives import answer_all_reduce
from paceline.records import Record
from paceline.reports.plots.collectives import plot_communication
from tests.unit.course.report_cases import GPU, UNSHAPED, check, make_record
from tests.unit.record_factory import ENVIRONMENT

LAB = {"num_hosts": 2, "link_rate_bits_per_s": 8e9}
FAR = {**GPU, "num_hosts": 2}
MB = 1_000_000
NVLINK = ("NVLink 4", "450 GB/s", "The link is the bottleneck")


def _comm(size: int = MB, bus: float = 1e9, **case: Any) -> Record:
    """Returns an all-reduce with a bus bandwidth; one rank has none and takes 1 ms."""
    factor = float(bus_factor("all_reduce", case.get("world_size", 2)))
    seconds = size * factor / bus or 1e-3
    metrics = {"time_s": seconds, "algorithm_bandwidth_bytes_per_s": size / seconds}
    metrics |= {"bus_bandwidth_bytes_per_s": size / seconds * factor}
    return make_record("comm", metrics, operation="all_reduce", size_bytes=size, **case)


def _two(bus: float = 1e9, **case: Any) -> list[Record]:
    return [_comm(size, bus, **case) for size in (MB, 10 * MB)]


def _fit(latency_s: float, **case: Any) -> list[Record]:
    metrics = {"latency_s": latency_s, "max_relative_error": 0.05}
    sizes = {"smallest_bytes": 1.0 * MB, "largest_bytes": 100.0 * MB, "operation": "all_reduce"}
    fit = make_record("collective_fit", metrics, **{**sizes, **case})
    return [_comm(), _comm(100 * MB), _comm(10 * MB, world_size=4), fit]


def _sizes(small: float) -> list[Record]:
    # The last record has another number of threads, so it is not part of the curve.
    return [_comm(bus=small), _comm(100 * MB), _comm(200 * MB, 1e6, threads=2)]


def _ranks(bus: float, num_processors: int = 2, **case: Any) -> list[Record]:
    there = msgspec.structs.replace(ENVIRONMENT, num_processors=num_processors)
    four = [_comm(size, bus, world_size=4, **case) for size in (10 * MB, 100 * MB)]
    return [msgspec.structs.replace(each, environment=there) for each in (*_two(**case), *four)]


LATENCY, SIZES, RANKS = "call_latency", "bandwidth_by_size", "bandwidth_by_ranks"
LOOPBACK, UNKNOWN, LINK = "loopback", "unknown_link", "link_share"
ONE_CURVE, CROWDED = {SIZES: {"world_size": 2}, RANKS: None}, "4 ranks share 2 processors"


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        # 1 MB takes 1 ms.
        (_fit(8e-4), {LATENCY: {"latency_s": 8e-4, "latency_share": 0.8, "error_share": 0.05}}),
        (_fit(2e-3), {LATENCY: {"latency_share": 1.0}}),
        (_fit(0.0), {LATENCY: {"latency_s": 0.0, "latency_share": 0.0}}),
        # Fits of other ranks, sizes or machines do not apply.
        (_fit(8e-4, world_size=4), {LATENCY: None}),
        (_fit(8e-4, threads=2), {LATENCY: None}),
        (_fit(8e-4, hardware="another"), {LATENCY: None}),
        (_fit(8e-4, smallest_bytes=1e7), {LATENCY: None}),
        (_sizes(0.5e9), {SIZES: {"small_s": 0.002, "large_s": 0.1, "says": "few large"}}),
        (_sizes(0.5e9), {SIZES: {"small_bytes_per_s": 0.5e9, "says": "more (+100%)"}}),
        (_sizes(2e9), {SIZES: {"large_bytes_per_s": 1e9, "says": "less (-50%)", "remedy": ""}}),
        (_sizes(0.92e9), {SIZES: {"says": "within 10% (+9%)"}}),
        # Numbers of ranks are compared at a size that both have.
        (_ranks(0.95e9), {RANKS: {"many_bytes_per_s": 0.95e9, "says": ("10 MB", "10% (-5%)")}}),
        (_ranks(0.5e9), {RANKS: {"few_bytes_per_s": 1e9, "says": ("less", CROWDED)}}),
        (_ranks(0.5e9, 8), {RANKS: {"says": "less", "remedy": ""}}),
        (_ranks(2e9, num_hosts=4), {RANKS: {"few_ranks": 2, "many_ranks": 4, "says": "more"}}),
        ([*_two(), _comm(100 * MB, world_size=4)], ONE_CURVE),
        # Throughput is compared only with a link whose rate is known.
        (_two(), {LOOPBACK: {"bus_bytes_per_s": 1e9}, UNKNOWN: None, LINK: None}),
        (_two(link_rate_bits_per_s=2e9), {LOOPBACK: {}, LINK: None}),
        (_two(**UNSHAPED), {UNKNOWN: {"says": "stream reached 20 Gbit/s"}, LINK: None}),
        (_two(num_hosts=2), {UNKNOWN: {"bus_bytes_per_s": 1e9}, LOOPBACK: None}),
        (_two(**FAR), {UNKNOWN: {}, LINK: None}),
        (_two(**{**GPU, "hardware": "some GPU"}), {UNKNOWN: {}, LOOPBACK: None}),
        (_two(4.4e11, **GPU), {LINK: {LINK: 0.978, "says": NVLINK}}),
        (_two(5.1e11, **GPU), {LINK: {LINK: 1.133, "says": "did not go over this link"}}),
        (_two(0.5e9, **LAB), {LINK: {LINK: 0.5, "says": "shaped to 8 Gbit/s"}, LOOPBACK: None}),
        (_two(0.5e9, world_size=4, **LAB), {LINK: {"bus_bytes_per_s": 0.5e9}}),
        # One rank does not communicate.
        (_two(world_size=1), {}),
        (_two(world_size=1, **GPU), {}),
        ([*_two(world_size=1, **GPU), *_two(4e11, **GPU)], ONE_CURVE),
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_findings(records: list[Record], expected: Any) -> None:
    check(answer_all_reduce, records, expected)


def test_the_picture_has_a_curve_or_says_why_not() -> None:
    curve, unknown = "all_reduce: line rate", "no line rate is known, so no theoretical curve"
    cases: Any = (({**GPU, "world_size": 1}, []), (GPU, [curve]), (LAB, [curve]))
    cases += (({}, ["loopback: no line rate, so no theoretical curve"]),)
    for case, expected in (*cases, (UNSHAPED, [unknown]), (FAR, [unknown])):
        axes = plot_communication(_two(**case)).axes[0]
        texts = [each.get_text() for each in axes.texts]
        assert [*texts, *(str(line.get_label()) for line in axes.lines[1:])] == expected
