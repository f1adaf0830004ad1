"""Tests of memory by category: computed by hand, and for a real step."""

import json
import pathlib

import pytest
import torch
from torch.profiler import record_function

from paceline.core.ranges import BACKWARD, FORWARD, OPTIMIZER
from paceline.traces.capture import record_memory
from paceline.traces.memory import (
    Allocation,
    AllocationTrace,
    Category,
    allocation_changes,
    memory_timeline,
    peak_allocations,
    read_allocations,
)

CPU = torch.device("cpu")


def _allocation(address: int, num_bytes: int, start: float, end: float | None) -> Allocation:
    return Allocation(
        address=address, num_bytes=num_bytes, start=start, end=end, place="line", operator="op"
    )


def test_categories_worked_by_hand() -> None:
    trace = AllocationTrace(
        allocations=[
            _allocation(1, 100, start=1, end=3),  # Allocated and freed in forward.
            _allocation(2, 200, start=2, end=15),  # Kept by forward for backward.
            _allocation(3, 400, start=12, end=25),  # A gradient.
            _allocation(3, 50, start=5, end=6),  # The same address, before it was a gradient.
            _allocation(4, 800, start=13, end=14),  # Allocated and freed in backward.
            _allocation(5, 1600, start=22, end=None),  # From the optimizer, never freed.
        ],
        ranges={FORWARD: (0, 10), BACKWARD: (10, 20), OPTIMIZER: (20, 30)},
    )
    timeline = memory_timeline(
        trace, resident={Category.PARAMETERS: 7}, gradient_addresses={3}, num_points=1000
    )
    assert timeline.peak_bytes == 7 + 400 + 1600
    assert timeline.peak_by_category[Category.GRADIENTS] == 400
    assert timeline.num_bytes[Category.PARAMETERS] == [7] * len(timeline.times_s)
    assert max(timeline.num_bytes[Category.ACTIVATIONS]) == 200
    assert max(timeline.num_bytes[Category.TEMPORARY]) == 1600
    at_backward = timeline.times_s.index(13e-6)
    then = {category: values[at_backward] for category, values in timeline.num_bytes.items()}
    assert {category: num_bytes for category, num_bytes in then.items() if num_bytes} == {
        Category.PARAMETERS: 7,
        Category.GRADIENTS: 400,
        Category.ACTIVATIONS: 200,
        Category.TEMPORARY: 800,
    }
    assert [group.num_bytes for group in timeline.largest[:2]] == [1600, 800]


def test_without_backward_forward_leaves_nothing() -> None:
    trace = AllocationTrace(
        allocations=[_allocation(1, 100, start=1, end=None)], ranges={FORWARD: (0, 10)}
    )
    timeline = memory_timeline(trace, resident={}, gradient_addresses=())
    assert timeline.peak_by_category[Category.TEMPORARY] == timeline.peak_bytes == 100


def test_a_real_step(tmp_path: pathlib.Path) -> None:
    width, rows = 256, 64
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width, bias=False),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 1, bias=False),
    )
    inputs = torch.randn(rows, width)

    def forward() -> torch.Tensor:
        with record_function(FORWARD):
            return model(inputs).sum()

    def backward(loss: torch.Tensor) -> None:
        with record_function(BACKWARD):
            loss.backward()

    backward(forward())
    model.zero_grad()
    path = tmp_path / "memory.json"
    with record_memory(path, CPU, tmp_path / "snapshot.pickle"):
        backward(forward())
    addresses = {
        p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None
    }
    trace = read_allocations(path, on_device=False)
    timeline = memory_timeline(trace, resident={}, gradient_addresses=addresses)
    assert timeline.num_bytes[Category.GRADIENTS][-1] == 4 * (width * width + width)
    # The output of tanh is needed by its own backward and by the last layer's; the rest is small.
    activations = max(timeline.num_bytes[Category.ACTIVATIONS])
    assert 4 * rows * width <= activations <= 2.2 * 4 * rows * width
    model.zero_grad()
    peaks = peak_allocations({"step": lambda: backward(forward())})
    assert timeline.peak_bytes == pytest.approx(peaks["step"], rel=0.01)
    largest = timeline.largest[0]
    assert (largest.category, largest.num_bytes) == (Category.GRADIENTS, 4 * width * width)
    # Backward runs no Python, so its line is that of the forward operator.
    assert "Backward0 of" in largest.place
    assert "traces/test_memory.py" in largest.place
    of_forward = [g for g in timeline.largest if g.category == Category.ACTIVATIONS]
    assert all("traces/test_memory.py" in allocation.place for allocation in of_forward)


def test_a_release_that_is_reported_late_does_not_count_memory_twice() -> None:
    # The second allocation at address 1 reuses memory whose release is reported after it.
    reported = [(1, 100), (2, 50), (1, 80), (1, -100), (2, -50), (1, -80)]
    assert list(allocation_changes(reported)) == [100, 50, -20, 0, -50, -80]


def test_a_release_that_is_reported_late_ends_only_its_own_allocation(
    tmp_path: pathlib.Path,
) -> None:
    reported = [(1, 100), (1, 80), (1, -100), (1, -80)]
    events = [
        {
            "ph": "i", "name": "[memory]", "tid": 1, "ts": float(moment),
            "args": {"Addr": address, "Bytes": num_bytes, "Device Type": 0},
        }
        for moment, (address, num_bytes) in enumerate(reported)
    ]  # fmt: skip
    path = tmp_path / "memory.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_allocations(path, on_device=False).allocations
    assert [(each.num_bytes, each.start, each.end) for each in found] == [(100, 0, 1), (80, 1, 3)]


def test_what_was_there_before_may_be_released() -> None:
    assert list(allocation_changes([(7, -30), (7, 30), (7, -30)])) == [-30, 30, -30]
