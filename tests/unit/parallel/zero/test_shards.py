"""A rank's shards of flat parameters: views, masters, gradients and memory order."""

import pytest
import torch

from paceline.parallel.zero.flat_parameters import flat_elements
from tests.unit.parallel.zero.flats import make_flat


def test_shards_are_views_of_this_ranks_part() -> None:
    for rank, expected in (
        (0, [("p3", 0, 5, 0), ("p2", 0, 8, 8)]),
        (1, [("p2", 8, 10, 0), ("p1", 0, 3, 4), ("p0", 0, 6, 8)]),
    ):
        flat = make_flat(rank)
        names = dict(zip(flat.parameters, flat.names, strict=True))
        assert flat.names == ["p3", "p2", "p1", "p0"]
        assert [
            (names[shard.parameter], shard.start, shard.end, flat.offset_of(shard))
            for shard in flat.shards
        ] == expected
        flat.gradient = torch.arange(16.0)
        for shard in flat.shards:
            assert not shard.is_whole
            own = shard.parameter.detach()[shard.start : shard.end]
            assert torch.equal(shard.tensor, own)
            assert shard.tensor.data_ptr() == own.data_ptr()
            begin = flat.offset_of(shard)
            assert flat.gradient_of(shard).tolist() == list(
                range(begin, begin + shard.end - shard.start)
            )
        assert flat.local_shard.numel() == 16
        assert flat.layout.num_elements == 32


def test_a_master_is_a_copy_in_its_dtype() -> None:
    flat = make_flat(1, master_dtype=torch.float64)
    assert flat.has_master
    assert flat.master.dtype == torch.float64
    assert torch.equal(flat.master.float(), flat.local_shard)
    assert [flat.offset_of(shard) for shard in flat.shards] == [0, 4, 8]
    for shard in flat.shards:
        assert shard.tensor.dtype == torch.float64
        begin = flat.offset_of(shard)
        assert shard.tensor.data_ptr() == flat.master[begin:].data_ptr()
    for same in (None, torch.float32):
        plain = make_flat(1, master_dtype=same)
        assert not plain.has_master
        assert plain.master is plain.local_shard


def test_a_master_follows_edits_and_keeps_what_rounds_to_the_same() -> None:
    flat = make_flat(1, master_dtype=torch.float64)
    precise = flat.master * (1 + 2.0**-40)
    flat.master.copy_(precise)
    flat.follow_edits()
    assert torch.equal(flat.master, precise)
    with torch.no_grad():
        flat.parameters[2].fill_(7.0)
    flat.follow_edits()
    expected = precise.clone()
    expected[4:7] = 7.0
    assert torch.equal(flat.master, expected)
    # Without an edit that torch has counted, the master is not compared.
    flat.parameters[3].data.fill_(9.0)
    flat.follow_edits()
    assert torch.equal(flat.master, expected)
    flat.refresh_master()
    expected[8:14] = 9.0
    assert torch.equal(flat.master, expected)


def test_parameters_must_stay_where_they_are() -> None:
    flat = make_flat(0)
    flat.require_in_place()
    flat.parameters[2].data = flat.parameters[2].data.clone()
    with pytest.raises(Exception, match=r"^parameter 'p1' was moved or converted after its memory"):
        flat.require_in_place()


def test_clearing_a_flats_gradients() -> None:
    flat = make_flat(1)
    first, second, _ = flat.shards
    for set_to_none in (False, True):
        first.tensor.grad = torch.ones_like(first.tensor)
        flat.local_gradients.add(first.parameter)
        flat.undecided[second] = 0, torch.ones(3)
        flat.was_trained = True
        flat.zero_gradients(set_to_none=set_to_none)
        assert not flat.local_gradients
        assert not flat.undecided
        # Gradients of zero still count: momentum goes on.
        assert flat.was_trained == (not set_to_none)
        assert (first.tensor.grad is None) == set_to_none
        assert set_to_none or not first.tensor.grad.any()
        assert second.tensor.grad is None


def test_a_flat_is_trained_as_long_as_one_of_its_parameters_is() -> None:
    flat = make_flat(0)
    for parameter in flat.parameters[:-1]:
        parameter.requires_grad_(False)
    assert flat.is_trained
    flat.parameters[-1].requires_grad_(False)
    assert not flat.is_trained


def test_elements_in_memory_order() -> None:
    plain = torch.arange(6.0).view(2, 3)
    turned = plain.T
    assert flat_elements(plain, plain).tolist() == [0, 1, 2, 3, 4, 5]
    assert flat_elements(plain, plain).data_ptr() == plain.data_ptr()
    assert flat_elements(turned, turned).tolist() == [0, 1, 2, 3, 4, 5]
    # Values of other strides are put into the parameter's order.
    assert flat_elements(turned, turned.contiguous()).tolist() == [0, 1, 2, 3, 4, 5]
    assert flat_elements(plain, turned.contiguous().T).tolist() == [0, 1, 2, 3, 4, 5]
    assert flat_elements(plain, plain.double().T.contiguous().T).dtype == torch.float64
    # From the middle of a larger tensor.
    large = torch.arange(12.0)
    assert flat_elements(plain, large[3:9].view(2, 3)).tolist() == [3, 4, 5, 6, 7, 8]
    pairs = torch.tensor([1 + 2j, 3 - 4j])
    assert flat_elements(pairs, pairs).tolist() == [1, 2, 3, -4]
