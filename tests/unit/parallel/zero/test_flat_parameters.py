"""Tests that every element has exactly one owner, and that shards are balanced."""

import time

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.parallel.buckets import TensorSpec, tensor_spec
from paceline.parallel.zero.flat_parameters import Partition, ShardLayout, plan_shards

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def _specs(sizes: list[tuple[int, int]]) -> list[TensorSpec]:
    return [TensorSpec(size, DTYPES[kind], CPU) for size, kind in sizes]


SIZES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 1)), min_size=1, max_size=20)


@given(SIZES, st.integers(1, 9), st.sampled_from(Partition))
def test_every_element_has_one_owner(
    sizes: list[tuple[int, int]], num_ranks: int, partition: Partition
) -> None:
    specs = _specs(sizes)
    owned: list[list[int]] = [[0] * size for size, _ in sizes]
    for layout in plan_shards(specs, [0] * num_ranks, partition):
        assert len(layout.borders) == num_ranks + 1
        for rank in range(num_ranks):
            for tensor, start, end, offset in layout.slices(rank):
                assert layout.borders[rank] <= offset
                assert offset + end - start <= layout.borders[rank + 1]
                assert specs[tensor].dtype == layout.dtype
                if partition is Partition.PARAMETERS:
                    assert (start, end) == (0, specs[tensor].num_elements)
                for element in range(start, end):
                    owned[tensor][element] += 1
    assert all(count == 1 for of_tensor in owned for count in of_tensor)


@given(SIZES, st.integers(1, 9))
def test_elements_are_cut_evenly(sizes: list[tuple[int, int]], num_ranks: int) -> None:
    for layout in plan_shards(_specs(sizes), [0] * num_ranks, Partition.ELEMENTS):
        lengths = {layout.borders[rank + 1] - layout.borders[rank] for rank in range(num_ranks)}
        assert len(lengths) == 1
        padded = sum(-(-size // 8) * 8 for size, _ in sizes)
        assert lengths.pop() <= padded / num_ranks + 8


def test_the_largest_parameters_are_dealt_out_first() -> None:
    sizes = [(1, 0), (50, 0), (2, 0), (48, 0), (3, 0)]  # 50 + 2 and 48 + 3 + 1
    loads = [0, 0]
    plan_shards(_specs(sizes), loads, Partition.PARAMETERS)
    assert loads == [4 * 52, 4 * 52]
    # A later group goes to the rank with the smaller load.
    plan_shards(_specs([(7, 0)]), loads, Partition.PARAMETERS)
    assert loads == [4 * 59, 4 * 52]
    plan_shards(_specs([(3, 0)]), loads, Partition.PARAMETERS)
    assert loads == [4 * 59, 4 * 55]


def test_a_layout_for_many_ranks_takes_no_memory_for_each() -> None:
    """Plans 10^12 elements over 16,384 ranks: a rank's work must not grow with the world size."""
    specs = [TensorSpec(10**9, torch.float32, CPU) for _ in range(1000)]
    began = time.process_time()
    (layout,) = plan_shards(specs, [0] * 16_384, Partition.ELEMENTS)
    pieces = list(layout.slices(9_999))
    # Milliseconds on an idle machine; work for every rank and tensor would take seconds.
    assert time.process_time() - began < 3
    assert isinstance(layout.borders, range)
    assert 1 <= len(pieces) <= 2
    assert sum(piece.end - piece.start for piece in pieces) == layout.borders[1]


def test_layouts_of_nothing_and_of_whole_parameters() -> None:
    parameters = [nn.Parameter(torch.zeros(0)) for _ in range(2)]
    specs = [tensor_spec(parameter) for parameter in parameters]
    (layout,) = plan_shards(specs, [0] * 3, Partition.ELEMENTS)
    assert list(layout.borders) == [0, 0, 0, 0]
    assert layout.num_elements == 0
    assert [list(layout.slices(rank)) for rank in range(3)] == [[], [], []]
    specs = [tensor_spec(torch.zeros(size)) for size in (5, 9, 3)]
    (layout,) = plan_shards(specs, [0] * 4, Partition.PARAMETERS)
    assert isinstance(layout, ShardLayout)
    # 9 goes to the first rank, 5 to the second, 3 to the third, nothing to the last.
    assert list(layout.borders) == [0, 12, 20, 24, 24]
    slices = [[tuple(each) for each in layout.slices(rank)] for rank in range(4)]
    assert slices == [[(1, 0, 9, 0)], [(0, 0, 5, 12)], [(2, 0, 3, 20)], []]
    (layout,) = plan_shards(specs, [100, 0], Partition.PARAMETERS)
    assert list(layout.borders) == [0, 0, 24]
    (layout,) = plan_shards(specs[:1], [0] * 3, Partition.ELEMENTS)
    assert layout.borders == range(0, 13, 4)
    assert [[tuple(each) for each in layout.slices(rank)] for rank in range(3)] == [
        [(0, 0, 4, 0)],
        [(0, 4, 5, 4)],
        [],
    ]
