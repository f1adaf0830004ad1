import gc
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.accounting.buckets import EDGE_BYTES
from paceline.parallel.buckets import (
    Bucket,
    RankWeight,
    TensorSpec,
    plan_buckets,
    tensor_spec,
    view_like,
)

CPU = torch.device("cpu")

_SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.integers(0, 5000),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        st.sampled_from([CPU, torch.device("cuda", 0), torch.device("cuda", 1)]),
    ),
    max_size=60,
)
_CAPS = st.one_of(st.none(), st.integers(0, 60_000))


@given(_SPECS, _CAPS)
def test_every_tensor_lies_in_one_bucket_aligned_and_apart(
    tensors: list[TensorSpec], cap: int | None
) -> None:
    plans = plan_buckets(tensors, cap)
    placed = [slot.tensor for plan in plans for slot in plan.slots]
    assert sorted(placed) == list(range(len(tensors)))
    for plan in plans:
        end = 0
        for slot in plan.slots:
            spec = tensors[slot.tensor]
            assert (spec.dtype, spec.device) == (plan.dtype, plan.device)
            assert slot.num_elements == spec.num_elements
            assert slot.offset >= end
            assert slot.offset * plan.dtype.itemsize % 16 == 0
            end = slot.offset + slot.num_elements
        assert end <= plan.num_elements


@given(_SPECS, _CAPS)
def test_buckets_follow_backward_and_keep_to_the_cap(
    tensors: list[TensorSpec], cap: int | None
) -> None:
    plans = plan_buckets(tensors, cap)
    last = [plan.slots[-1].tensor for plan in plans]
    assert last == sorted(last, reverse=True)
    for plan in plans:
        inside = [slot.tensor for slot in plan.slots]
        assert inside == sorted(inside, reverse=True)
        num_bytes = sum(slot.num_elements for slot in plan.slots) * plan.dtype.itemsize
        assert cap is None or num_bytes <= cap or len(plan.slots) == 1


def _plan_sizes(sizes_mib: list[float], cap_mib: float | None) -> list[list[int]]:
    tensors = [TensorSpec(int(s * 2**18), torch.float32, CPU) for s in sizes_mib]
    cap = None if cap_mib is None else cap_mib * 2**20
    return [[slot.tensor for slot in plan.slots] for plan in plan_buckets(tensors, cap)]


@pytest.mark.parametrize(
    ("sizes_mib", "cap_mib", "expected"),
    [
        # The first and the last bucket are small, and so is the remainder in the middle.
        ([0.5] * 12, 2, [[11, 10], [9, 8, 7], [6, 5], [4, 3, 2], [1, 0]]),
        # The last tensor to become ready is larger than a small bucket, so it is alone.
        ([3, 1, 1, 1, 0.5, 0.25], 25, [[5, 4, 3], [2, 1], [0]]),
        # Target sizes grow from both ends: 1, 1.5, 2.25, 3.375 and then the cap.
        (
            [1] * 18,
            4,
            [[17], [16, 15], [14, 13, 12], [11, 10], [9, 8, 7, 6], [5, 4, 3], [2, 1], [0]],
        ),
        # A tensor over the cap is also alone in the middle.
        ([0.5, 1, 9, 1, 1], 4, [[4, 3], [2], [1, 0]]),
        ([1, 2, 3], None, [[2, 1, 0]]),
        ([1, 2, 3], 0, [[2], [1], [0]]),
        ([], 5, []),
    ],
)
def test_worked_plans(
    sizes_mib: list[float], cap_mib: float | None, expected: list[list[int]]
) -> None:
    assert _plan_sizes(sizes_mib, cap_mib) == expected


def test_the_edges_hold_a_mebibyte() -> None:
    assert EDGE_BYTES == 2**20


def test_ten_thousand_tensors_are_planned_at_once() -> None:
    tensors = [TensorSpec(i * 7919 % 100_000, torch.float32, CPU) for i in range(10_000)]
    durations = []
    gc.disable()  # The cost of garbage collection depends on earlier tests.
    try:
        for _ in range(20):
            started = time.process_time()
            plan_buckets(tensors, 25 * 2**20)
            durations.append(time.process_time() - started)
    finally:
        gc.enable()
    # 10 to 30 ms depending on machine and load; a quadratic algorithm takes seconds.
    assert min(durations) < 0.5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(4, 5),
        torch.zeros(4, 5).T,
        torch.zeros(4, 10)[:, ::2],
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(1, 5, 1),
        torch.zeros(3, dtype=torch.complex64),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.stride()}-{tensor.dtype}",
)
def test_a_view_covers_its_piece_in_the_shape_of_the_parameter(tensor: torch.Tensor) -> None:
    spec = tensor_spec(tensor)
    buffer = torch.zeros(spec.num_elements + 4, dtype=spec.dtype)
    view = view_like(tensor, buffer[2:-2])
    assert view.shape == tensor.shape
    assert view.dtype == tensor.dtype
    view.fill_(1 + 1j if tensor.is_complex() else 1)
    assert buffer.tolist() == [0.0, 0.0, *[1.0] * spec.num_elements, 0.0, 0.0]


def test_a_view_has_the_strides_of_a_dense_parameter() -> None:
    kernel = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert view_like(kernel, torch.zeros(120)).stride() == kernel.stride()


def test_a_gradient_is_scaled_on_the_way_and_where_it_lies_already() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    (plan,) = plan_buckets([tensor_spec(parameter)], None)
    bucket = Bucket(plan, [parameter], ["p"], None)
    parameter.grad = torch.tensor([2.0, 4.0, 6.0])
    bucket.take([0], RankWeight(0.5))
    assert parameter.grad.data_ptr() == bucket.buffer.data_ptr()
    assert parameter.grad.tolist() == [1.0, 2.0, 3.0]
    bucket.take([0], RankWeight(0.5))
    assert parameter.grad.tolist() == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("reduction_dtype", [None, torch.bfloat16, torch.float64])
def test_a_message_is_as_long_as_its_plan_says(reduction_dtype: torch.dtype | None) -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5, 7))]
    (plan,) = plan_buckets([tensor_spec(parameter) for parameter in parameters], None)
    message = Bucket(plan, parameters, ["a", "b"], reduction_dtype).pack(set(), RankWeight(1.0))
    # Gradients, aligned to 16 bytes, then one number per parameter: whether it has a gradient.
    assert message.numel() == 36 + 4 + 2
    assert plan.message_bytes(reduction_dtype) == message.nbytes
