"""Recording of several ranks into one trace, and its analysis."""

import json
import pathlib
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.profiler import record_function

from paceline.core.ranges import step_range
from paceline.devices import accelerator
from paceline.parallel import BucketedDataParallel, RankPool
from paceline.traces import capture
from paceline.traces.analysis import analyse_trace
from paceline.traces.capture import TracePart, merge_traces, record_ranks
from paceline.traces.reader import TraceError
from tests import devices
from tests.distributed.toys import Layered, data, loss_of

Pools = Callable[[int], RankPool]


def _record(rank: int, _world_size: int, path: str) -> list[float]:
    torch.manual_seed(0)
    model = BucketedDataParallel(Layered(), bucket_size_mb=0.001)
    model.record_statistics()
    exposed = []
    with record_ranks(pathlib.Path(path), devices.own_device()):
        for step in range(3):
            dist.barrier()
            with record_function(step_range("toy")):
                loss_of(model(data(step, rank), rank)).backward()
                accelerator.synchronize(devices.own_device())  # The range is the host's.
            stats = model.synchronization_stats()
            assert stats is not None
            exposed.append(stats.exposed_wait_s)
    return exposed


def test_ranks_are_recorded_into_one_trace(rank_pool: Pools, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    rank_pool(2).run(_record, str(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
    events = json.loads(path.read_bytes())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    buckets = {event["name"] for event in events if event["name"].startswith("paceline::bucket_")}
    assert "paceline::bucket_0" in buckets
    lanes = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "communication"
    }
    # Messages of an accelerator are kernels in its streams.
    assert {process for process, _ in lanes} == (set() if devices.is_accelerator() else {0, 1})
    analysis = analyse_trace(path)
    assert [(step.rank, step.label) for step in analysis.steps] == [(0, "toy")] * 3 + [
        (1, "toy")
    ] * 3
    for step in analysis.steps:
        assert len(step.times.messages) == len(buckets)
        assert step.times.communication > 0
    # Ranks under one kernel share a clock: after a barrier they start within milliseconds.
    starts = {
        rank: [e["ts"] for e in events if e["name"] == step_range("toy") and e["pid"] == rank]
        for rank in (0, 1)
    }
    assert max(abs(a - b) for a, b in zip(starts[0], starts[1], strict=True)) < 100_000


def _offset(rank: int, world_size: int, ahead_ns: int) -> int:
    """Returns the clock offset with every rank but the first on a fake host with a clock ahead."""
    real_clock, real_kernel = time.time_ns, capture._kernel
    if rank > 0:
        capture._kernel = lambda: f"host of rank {rank}"
        time.time_ns = lambda: real_clock() + ahead_ns * rank
    try:
        return capture.clock_offset_ns(world_size, devices.own_device())
    finally:
        capture._kernel, time.time_ns = real_kernel, real_clock


def test_clocks_of_other_hosts_are_compared(rank_pool: Pools) -> None:
    ahead_ns = 7_000_000_000
    offsets = rank_pool(3).run(_offset, ahead_ns)
    assert offsets[0] == 0
    # The remaining error is at most half of the fastest round trip.
    assert offsets[1:] == [
        pytest.approx(-ahead_ns, abs=5_000_000),
        pytest.approx(-2 * ahead_ns, abs=5_000_000),
    ]


def test_parts_are_shifted_onto_one_clock(tmp_path: pathlib.Path) -> None:
    for rank, base in ((0, 5_000_000), (1, 1_000_000)):
        (tmp_path / f"{rank}").write_text(
            json.dumps(
                {
                    "traceEvents": [
                        {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
                        {
                            "ph": "X",
                            "cat": "cpu_op",
                            "name": "x",
                            "pid": 77,
                            "tid": 1,
                            "ts": 10.5,
                            "dur": 1,
                        },
                        {"ph": "s", "name": "ac2g", "id": 3, "pid": 77, "tid": 1, "ts": 11},
                    ],
                    "baseTimeNanoseconds": base,
                }
            )
        )
    parts = [
        TracePart(path=tmp_path / "0", rank=0, offset_ns=0),
        TracePart(path=tmp_path / "1", rank=1, offset_ns=2_000_000),
    ]
    merge_traces(parts, tmp_path / "merged.json")
    merged = json.loads((tmp_path / "merged.json").read_bytes())
    assert merged["baseTimeNanoseconds"] == 3_000_000
    found = {(e["pid"], e["ts"]) for e in merged["traceEvents"] if e["name"] == "x"}
    assert found == {(0, 2010.5), (1, 10.5)}
    assert {e["id"] for e in merged["traceEvents"] if e["ph"] == "s"} == {"0.3", "1.3"}


def test_a_directory_that_is_not_there_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "0").write_text('{"traceEvents": []}')
    part = TracePart(path=tmp_path / "0", rank=0, offset_ns=0)
    with pytest.raises(TraceError, match=r"could not be written to .*missing"):
        merge_traces([part], tmp_path / "missing" / "trace.json")
