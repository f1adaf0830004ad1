"""Tests that the numbers of collectives follow from the records, on CPUs, links and GPUs."""

from typing import Any

import msgspec
import pytest

from paceline.accounting.collectives import bus_factor
from paceline.course.parallel import all_reduce
from paceline.records import Record
from paceline.reports.plots.strategies import plot_communication
from tests.unit.course.report_cases import GPU, UNSHAPED, check, make_record
from tests.unit.record_factory import ENVIRONMENT

LAB = {"num_hosts": 2, "link_rate_bits_per_s": 8e9}
FAR = {**GPU, "num_hosts": 2}
MB = 1_000_000


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
    # The last record has another number of threads, so it is a curve of its own.
    return [_comm(bus=small), _comm(100 * MB), _comm(200 * MB, 1e6, threads=2)]


def _ranks(bus: float, num_processors: int = 2, **case: Any) -> list[Record]:
    there = msgspec.structs.replace(ENVIRONMENT, num_processors=num_processors)
    four = [_comm(size, bus, world_size=4, **case) for size in (10 * MB, 100 * MB)]
    return [msgspec.structs.replace(each, environment=there) for each in (*_two(**case), *four)]


NVLINK = {"link_share": 0.978, "link_bytes_per_s": 4.5e11, "says": "(link: NVLink 4"}
UNKNOWN: dict[str, Any] = {"bus_bytes_per_s": 1e9, "link_bytes_per_s": None, "link_share": None}
LOOPBACK, UNNAMED = {**UNKNOWN, "says": "loopback;"}, {**UNKNOWN, "says": "of unknown rate;"}
STREAM = {**UNKNOWN, "says": "(link: a single stream reached 20 Gbit/s just before;"}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (_sizes(0.5e9), {"bus_bytes_per_s": 1e9, "says": "all-reduce of 100 MB reaches"}),
        (_sizes(0.5e9), {"bus_bytes_per_s": 1e6, "says": "of 200 MB"}),
        # Each number of ranks has a sentence.
        (_ranks(0.95e9), {"world_size": 4, "bus_bytes_per_s": 0.95e9}),
        (_ranks(0.95e9), {"world_size": 2, "bus_bytes_per_s": 1e9, "says": "of 10 MB"}),
        (_ranks(0.5e9, 8), {"world_size": 4, "num_processors": 8}),
        (_ranks(2e9, num_hosts=4), {"world_size": 4, "bus_bytes_per_s": 2e9}),
        # Throughput is compared only with a link whose rate is known.
        (_two(), LOOPBACK),
        (_two(link_rate_bits_per_s=2e9), LOOPBACK),
        (_two(**UNSHAPED), STREAM),
        (_two(num_hosts=2), UNNAMED),
        (_two(**FAR), UNNAMED),
        (_two(**{**GPU, "hardware": "some GPU"}), UNNAMED),
        (_two(4.4e11, **GPU), NVLINK),
        (_two(5.1e11, **GPU), {"link_share": 1.133}),
        (_two(0.5e9, **LAB), {"link_share": 0.5, "says": "links shaped to 8 Gbit/s"}),
        (_two(0.5e9, world_size=4, **LAB), {"bus_bytes_per_s": 0.5e9}),
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_numbers(records: list[Record], expected: Any) -> None:
    check(all_reduce, records, {"all_reduce": expected})


@pytest.mark.parametrize(
    ("case", "num_tables"),
    [({}, 2), ({"world_size": 4}, 2), ({"threads": 2}, 1), ({"hardware": "another"}, 1)],
)
@pytest.mark.usefixtures("no_pictures")
def test_a_fit_of_the_same_ranks_and_machine_has_a_table(case: Any, num_tables: int) -> None:
    (block,) = check(all_reduce, _fit(8e-4, **case), {"all_reduce": {"bus_bytes_per_s": 1e9}})
    assert len(block.tables) == num_tables


@pytest.mark.usefixtures("no_pictures")
def test_one_rank_does_not_communicate() -> None:
    check(all_reduce, _two(world_size=1), {})
    check(all_reduce, _two(world_size=1, **GPU), {})
    both = [*_two(world_size=1, **GPU), *_two(4e11, **GPU)]
    (block,) = check(all_reduce, both, {"all_reduce": {"world_size": 2}})
    assert len(block.findings) == 1


def test_the_picture_has_a_curve_or_says_why_not() -> None:
    curve, unknown = "all_reduce: line rate", "no line rate is known, so no theoretical curve"
    cases: Any = (({**GPU, "world_size": 1}, []), (GPU, [curve]), (LAB, [curve]))
    cases += (({}, ["loopback: no line rate, so no theoretical curve"]),)
    for case, expected in (*cases, (UNSHAPED, [unknown]), (FAR, [unknown])):
        axes = plot_communication(_two(**case)).axes[0]
        texts = [each.get_text() for each in axes.texts]
        assert [*texts, *(str(line.get_label()) for line in axes.lines[1:])] == expected
