import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.accounting.collective_fit import fit_collective
from paceline.accounting.overlap import overlap_timeline
from paceline.core.units import MIB
from paceline.parallel.backward_run import BucketStats, SynchronizationStats
from paceline.parallel.bucket_size import (
    CANDIDATES_MB,
    GroupCost,
    choose_bucket_size,
    find_slowdown,
)
from paceline.parallel.buckets import TensorSpec, plan_buckets

NUM_LAYERS, LAYER_ELEMENTS = 32, 2**20


def _tensors() -> list[TensorSpec]:
    return [
        TensorSpec(f"layer{i}", LAYER_ELEMENTS, torch.float32, torch.device("cpu"))
        for i in range(NUM_LAYERS)
    ]


def _arrivals(backward_s: float) -> list[float]:
    return [backward_s * (NUM_LAYERS - i) / NUM_LAYERS for i in range(NUM_LAYERS)]


def _cost(call_s: float, bytes_per_s: float, start_s: float = 0.0) -> GroupCost:
    sizes = [2**power for power in range(12, 27, 2)]
    samples = {size: [call_s + size / bytes_per_s] * 3 for size in sizes}
    return GroupCost(fit=fit_collective(samples), start_s=start_s)


@settings(deadline=None, max_examples=25)
@given(
    call_s=st.floats(1e-5, 5e-2), bytes_per_s=st.floats(1e7, 1e10), backward_s=st.floats(0.01, 5)
)
def test_no_other_candidate_is_predicted_to_be_better(
    call_s: float, bytes_per_s: float, backward_s: float
) -> None:
    cost = _cost(call_s, bytes_per_s)
    arrivals = _arrivals(backward_s)
    choice = choose_bucket_size(_tensors(), arrivals, cost)
    for size in CANDIDATES_MB:
        plans = plan_buckets(_tensors(), size * MIB)
        ready = [max(arrivals[slot.tensor] for slot in plan.slots) for plan in plans]
        times = [cost.fit.time_s(plan.message_bytes(None)) for plan in plans]
        exposed = overlap_timeline(ready, times, backward_s).exposed_s
        assert choice.candidates[size].exposed_s == exposed
        assert choice.candidates[choice.bucket_size_mb].exposed_s <= exposed


def test_costly_calls_make_large_buckets_and_cheap_ones_small() -> None:
    costly = choose_bucket_size(_tensors(), _arrivals(0.5), _cost(0.1, 1e9))
    cheap = choose_bucket_size(_tensors(), _arrivals(0.5), _cost(1e-6, 3e8))
    assert cheap.bucket_size_mb < 10 < costly.bucket_size_mb


def test_starting_a_call_counts_where_nothing_else_does() -> None:
    # The line is so fast that every size is hidden alike: fewer calls are better.
    free = choose_bucket_size(_tensors(), _arrivals(5.0), _cost(1e-5, 1e11))
    priced = choose_bucket_size(_tensors(), _arrivals(5.0), _cost(1e-5, 1e11, start_s=1e-3))
    chosen = priced.candidates[priced.bucket_size_mb]
    assert chosen.num_buckets <= free.candidates[free.bucket_size_mb].num_buckets
    fewest = min(candidate.num_buckets for candidate in priced.candidates.values())
    assert chosen.num_buckets == fewest


def test_the_choice_explains_itself() -> None:
    text = choose_bucket_size(_tensors(), _arrivals(0.5), _cost(1e-3, 1e8)).explain()
    for part in ("buckets of ", "backward takes 500 ms", "1.00 ms", "100 MB/s", "25 MiB"):
        assert part in text, text


def test_the_slowdown_is_that_of_messages_that_ended_before_backward() -> None:
    fit = _cost(0.0, 1e6).fit

    def bucket(launch_s: float, finish_s: float) -> BucketStats:
        return BucketStats(
            num_bytes=100_000, num_parameters=1, launch_s=launch_s, finish_s=finish_s
        )

    # 0.1 s alone: the first takes 0.15 s, the second waits for it and takes 0.25 s; the third ends
    # after backward and does not count.
    buckets = (bucket(0.0, 0.15), bucket(0.1, 0.4), bucket(0.5, 1.2))
    stats = SynchronizationStats(buckets=buckets, backward_s=1.0, exposed_wait_s=0.2)
    assert find_slowdown(stats, fit) == pytest.approx(2.0)
    late = SynchronizationStats(buckets=buckets[2:], backward_s=1.0, exposed_wait_s=0.2)
    assert find_slowdown(late, fit) == 1.0


def test_slower_messages_beside_backward_make_the_end_longer() -> None:
    cost = _cost(1e-3, 3e8)
    free, slowed = (
        choose_bucket_size(_tensors(), _arrivals(0.6), cost, slowdown=slowdown)
        for slowdown in (1.0, 1.5)
    )
    for size in CANDIDATES_MB:
        assert slowed.candidates[size].exposed_s >= 0.99 * free.candidates[size].exposed_s
    # 128 MiB take 0.45 s alone and 0.67 s beside a backward of 0.6 s, which they then outlast.
    assert slowed.candidates[4].exposed_s > 2 * free.candidates[4].exposed_s
