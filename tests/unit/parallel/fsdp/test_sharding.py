"""Tests of splitting parameters into rows and reassembling them, for any number of ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.parallel.fsdp.sharding import LayerLayout, lay_out

SHAPES = st.lists(st.lists(st.integers(0, 7), min_size=0, max_size=3), min_size=1, max_size=5)


def _lay_out(parameters: list[Tensor], num_shards: int) -> LayerLayout:
    return lay_out(parameters, torch.float32, torch.device("cpu"), num_shards)


@given(shapes=SHAPES, num_shards=st.integers(1, 9))
def test_rows_of_all_ranks_are_the_parameter(shapes: list[list[int]], num_shards: int) -> None:
    parameters = [torch.randn(shape) for shape in shapes]
    layout = _lay_out(parameters, num_shards)
    rows = torch.full((num_shards, layout.length), float("nan"))
    for parameter, piece in zip(parameters, layout.pieces, strict=True):
        blocks = list(piece.blocks(rows, parameter))
        assert len(blocks) <= 2
        for target, source in blocks:
            target.copy_(source)
    for parameter, piece in zip(parameters, layout.pieces, strict=True):
        again = torch.empty_like(parameter)
        for source, target in piece.blocks(rows, again):
            target.copy_(source)
        assert torch.equal(again, parameter)
        if parameter.dim():
            # The same split as torch's Shard(0).
            chunks = parameter.chunk(num_shards)
            for shard in range(num_shards):
                local = piece.local(rows[shard], shard)
                expected = chunks[shard] if shard < len(chunks) else parameter[:0]
                assert torch.equal(local, expected)
                assert torch.equal(piece.own_rows(parameter, shard), expected)


@given(shapes=SHAPES, num_shards=st.integers(1, 9))
def test_pieces_begin_aligned_and_do_not_overlap(shapes: list[list[int]], num_shards: int) -> None:
    layout = _lay_out([torch.empty(shape) for shape in shapes], num_shards)
    end = 0
    for piece in sorted(layout.pieces, key=lambda piece: (piece.offset, piece.num_elements)):
        assert piece.offset % 4 == 0
        assert piece.offset >= end
        end = piece.offset + piece.num_elements
    assert end <= layout.length
    assert layout.row_length >= layout.length + len(shapes)
    for run in layout.runs:
        assert run.begin % 4 == 0
        assert run.begin < run.end <= layout.length


def test_large_contiguous_parameters_are_used_where_they_arrive() -> None:
    large = torch.empty(1024, 512)
    layout = _lay_out([torch.empty(512), large, torch.empty(512, 1024).T, torch.empty(3)], 4)
    alone = [layout.travels_alone(piece) for piece in layout.pieces]
    assert alone == [False, True, False, False]
    assert [run.is_one for run in layout.runs] == [False, True]
    # One rank has nothing to gather, so contiguous parameters are used in place.
    layout = _lay_out([torch.empty(512), large, torch.empty(512, 1024).T], 1)
    assert [layout.travels_alone(piece) for piece in layout.pieces] == [True, True, False]


@given(shapes=SHAPES, num_shards=st.integers(1, 9))
def test_a_message_has_a_column_per_parameter(shapes: list[list[int]], num_shards: int) -> None:
    layout = _lay_out([torch.empty(shape) for shape in shapes], num_shards)
    size = num_shards * layout.row_length
    message = torch.arange(float(size)).view(num_shards, layout.row_length)
    for piece, column in zip(layout.pieces, layout.columns(message), strict=True):
        expected = message[:, piece.offset : piece.offset + piece.num_elements]
        assert torch.equal(column, expected)
        assert column.untyped_storage().data_ptr() == message.untyped_storage().data_ptr()


def test_small_parameters_are_cut_at_once_if_nothing_lies_between_them() -> None:
    even = [torch.empty(4, 8), torch.empty(0, 3), torch.empty(16)]
    assert _lay_out(even, 2).packed_widths == [16, 0, 8]
    large = torch.empty(1024, 512)
    assert _lay_out([*even, large], 2).packed_widths == [16, 0, 8]
    between = [torch.empty(2, 3), torch.empty(16)]  # Three elements end at no multiple of 16 bytes.
    assert _lay_out(between, 2).packed_widths is None
    last_has_fewer = [torch.empty(5, 4), torch.empty(16)]
    assert _lay_out(last_has_fewer, 2).packed_widths is None
    without_rows = [torch.empty(()), torch.empty(16)]
    assert _lay_out(without_rows, 2).packed_widths is None
