"""Tests of the rows of messages between sites."""

import pytest
import torch

from paceline.core.outer import OuterCompression
from paceline.parallel.compression.codec import BLOCK
from paceline.parallel.outer.rows import Rows, packing_of

CPU = torch.device("cpu")


def _rows(compression: OuterCompression, num_blocks: int = 3) -> Rows:
    return Rows(packing_of(compression), num_blocks, CPU)


@pytest.mark.parametrize(
    ("compression", "tolerance", "num_bytes"),
    [("none", 0.0, 3072), ("bf16", 2e-2, 1536), ("int8", 2e-2, 774), ("int4", 0.4, 390)],
)
def test_numbers_arrive_as_exactly_as_they_are_packed(
    compression: OuterCompression, tolerance: float, num_bytes: int
) -> None:
    rows = _rows(compression)
    assert num_bytes < rows.row_bytes <= num_bytes + 24
    values = torch.randn(2 * BLOCK + 17, generator=torch.Generator().manual_seed(0))
    residual = torch.zeros(len(values) if compression in ("int8", "int4") else 0)
    sent = rows.empty(2)
    rows.write(sent[1], values, residual, 5)
    found = torch.ones_like(values)
    rows.read(sent[1], found, adds=False)
    assert (found - values).abs().max() <= tolerance
    if len(residual):
        assert torch.equal(found + residual, values)
    twice = found.clone()
    rows.read(sent[1], twice, adds=True)
    assert torch.equal(twice, 2 * found)


@pytest.mark.parametrize("compression", ["none", "int4"])
def test_every_flipped_bit_and_every_other_place_is_damage(compression: OuterCompression) -> None:
    rows = _rows(compression, 1)
    sent = rows.empty(1)
    rows.write(sent[0], torch.randn(BLOCK), torch.zeros(BLOCK), 5)
    assert rows.damaged(sent, [5]) == []
    assert rows.damaged(sent, [6]) == [0]
    for byte in range(rows.row_bytes):
        sent[0, byte] ^= 1 << byte % 8
        assert rows.damaged(sent, [5]) == [0]
        sent[0, byte] ^= 1 << byte % 8
    sent.zero_()
    assert rows.damaged(sent, [5]) == [0]


def test_a_row_may_be_empty() -> None:
    for compression in ("none", "int4"):
        rows = _rows(compression, 0)
        sent = rows.empty(2)
        rows.write(sent[0], torch.zeros(0), torch.zeros(0), 1)
        rows.write(sent[1], torch.zeros(0), torch.zeros(0), 2)
        rows.read(sent[0], torch.zeros(0), adds=True)
        assert rows.damaged(sent, [1, 3]) == [1]
