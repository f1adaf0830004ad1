"""Traces of the emulated device: its tasks by stream, linked to what launched them."""

import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.core.ranges import STEP
from paceline.parallel import RankPool
from paceline.traces.analysis import analyse_trace
from paceline.traces.capture import profiling, record_ranks
from tests import devices

DEVICE = torch.device("emulated", 0)


def _events(path: pathlib.Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in found if event.get("ph") == "X"]


def _lasting(events: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Returns when a named range of the device began and ended."""
    (found,) = _of(events, "gpu_user_annotation", name)
    return found["ts"], found["ts"] + found["dur"]


def _of(events: list[dict[str, Any]], category: str, name: str) -> list[dict[str, Any]]:
    return [each for each in events if each.get("cat") == category and each["name"] == name]


def test_a_trace_shows_tasks_in_their_streams(tmp_path: pathlib.Path, device_module: Any) -> None:
    factor = torch.randn(64, 64, device=DEVICE)
    other = torch.Stream(DEVICE)
    other.wait_stream(torch.accelerator.current_stream(DEVICE))
    factor @ factor  # Before the trace.
    with device_module.delays(seed=1, most_us=20_000), profiling(tmp_path / "trace", DEVICE):
        for _ in range(8):
            factor @ factor
        with other:
            factor.sum()
        torch.accelerator.synchronize()
    factor @ factor  # After it.
    events = _events(tmp_path / "trace")
    operators, tasks = _of(events, "cpu_op", "aten::mm"), _of(events, "kernel", "aten::mm")
    assert len(tasks) == 8
    operators.sort(key=lambda each: each["ts"])
    tasks.sort(key=lambda each: each["ts"])
    launched_by = {each["args"]["External id"]: each for each in operators}
    for task in tasks:
        assert task["ts"] > launched_by.pop(task["args"]["External id"])["ts"]
    assert any(each["ts"] > operators[-1]["ts"] for each in tasks)  # The host is ahead.
    for before, after in itertools.pairwise(tasks):
        assert before["ts"] + before["dur"] <= after["ts"]
    (aside,) = _of(events, "kernel", "aten::sum")
    assert aside["tid"] == other.stream_id
    assert {each["tid"] for each in tasks} == {0}
    launches = _of(events, "privateuse1_runtime", "emulatedLaunch")
    numbers = {each["args"]["correlation"] for each in launches}
    assert {each["args"]["correlation"] for each in tasks} <= numbers


def test_ranges_of_the_device_are_as_narrow_as_those_of_cupti(tmp_path: pathlib.Path) -> None:
    factor = torch.randn(8, 8, device=DEVICE, requires_grad=True)
    with profiling(tmp_path / "trace", DEVICE):
        with torch.profiler.record_function("outer"):
            product = factor @ factor
            with torch.profiler.record_function("inner"):
                total = product.sum()
        with torch.profiler.record_function("backward"):
            total.backward()  # In a thread of autograd.
        torch.accelerator.synchronize()
    events = _events(tmp_path / "trace")
    (first, *later), (second,) = (_of(events, "kernel", f"aten::{name}") for name in ("mm", "sum"))
    for name, task in (("outer", first), ("inner", second)):
        expected = (task["ts"], task["ts"] + task["dur"])
        assert _lasting(events, name) == pytest.approx(expected, rel=0, abs=0.01)
    assert _lasting(events, "backward")[1] < min(each["ts"] for each in later)


def _exchange(rank: int, _world_size: int, path: str, overlaps: bool) -> None:
    device = devices.device_of(rank)
    numbers = torch.ones(2**20, device=device)
    factor = torch.randn(500, 500, device=device)
    dist.all_reduce(numbers)
    torch.accelerator.synchronize()
    with record_ranks(pathlib.Path(path), device), torch.profiler.record_function(STEP):
        work = dist.all_reduce(numbers, async_op=True)
        if not overlaps:
            work.wait()
        for _ in range(20):
            factor = (factor @ factor).clamp(-1, 1)
        work.wait()
        torch.accelerator.synchronize()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, backend=devices.backend(), timeout_s=120) as pool:
        yield pool


@pytest.mark.parametrize("overlaps", [False, True])
def test_overlap_with_messages_is_seen(
    ranks: RankPool, tmp_path: pathlib.Path, overlaps: bool
) -> None:
    path = tmp_path / "trace.json"
    ranks.run(_exchange, str(path), overlaps)
    events = _events(path)
    messages = _of(events, "kernel", "nccl:all_reduce")
    assert {each["pid"] for each in messages} == {0, 1}
    steps = analyse_trace(path).steps
    assert {each.rank for each in steps} == {0, 1}
    for step in steps:
        assert step.times.busy > 0
        assert step.times.communication > 0
        assert (step.times.overlapped > 0) == overlaps
