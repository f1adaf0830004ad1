"""Tests of bucket division; tests of the containers check that theirs is the same."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.buckets import divide_as_torch, divide_into_buckets

SIZES = st.lists(st.integers(1, 10**7), min_size=1, max_size=50)
MEBIBYTE = 2**20


@given(SIZES, st.floats(1, 1e8))
def test_every_tensor_is_in_one_bucket(sizes: list[int], cap: float) -> None:
    tensors = range(len(sizes))
    for buckets in (divide_into_buckets(tensors, sizes, cap), divide_as_torch(tensors, sizes, cap)):
        assert [tensor for bucket in buckets for tensor in bucket] == list(tensors)
        assert all(buckets)


def test_without_a_cap_there_is_one_and_with_none_one_each() -> None:
    assert divide_into_buckets("abc", [5, 6, 7], None) == ["abc"]
    assert divide_into_buckets("abc", [5, 6, 7], 0) == ["a", "b", "c"]


def test_torch_ends_a_bucket_when_it_is_full() -> None:
    sizes = [MEBIBYTE // 2] * 2 + [2 * MEBIBYTE] * 4
    assert divide_as_torch("abcdef", sizes, 3 * MEBIBYTE) == ["abc", "de", "f"]


def test_torch_begins_with_a_small_bucket_only_where_no_size_is_given() -> None:
    sizes = [MEBIBYTE // 2] * 2 + [20 * MEBIBYTE] * 4
    assert divide_as_torch("abcdef", sizes, None) == ["ab", "cd", "ef"]
    assert divide_as_torch("abcdef", sizes, 25 * MEBIBYTE) == ["abcd", "ef"]
