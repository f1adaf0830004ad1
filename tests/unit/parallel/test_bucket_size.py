import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.accounting.collectives import fit_collective
from paceline.accounting.overlap import simulate_buckets
from paceline.core.units import MIB
from paceline.parallel.bucket_size import CANDIDATES_MB, GroupCost, choose_bucket_size
from paceline.parallel.buckets import TensorSpec, plan_buckets

NUM_LAYERS, LAYER_ELEMENTS = 32, 2**20


def _tensors() -> list[TensorSpec]:
    return [
        TensorSpec(LAYER_ELEMENTS, torch.float32, torch.device("cpu")) for i in range(NUM_LAYERS)
    ]


def _arrivals(backward_s: float) -> list[float]:
    return [backward_s * (NUM_LAYERS - i) / NUM_LAYERS for i in range(NUM_LAYERS)]


def _cost(latency_s: float, bytes_per_s: float, start_s: float = 0.0) -> GroupCost:
    sizes = [2**power for power in range(12, 27, 2)]
    samples = {size: [latency_s + size / bytes_per_s] * 3 for size in sizes}
    return GroupCost(fit=fit_collective(samples), start_s=start_s)


@settings(deadline=None, max_examples=25)
@given(
    latency_s=st.floats(1e-5, 5e-2), bytes_per_s=st.floats(1e7, 1e10), backward_s=st.floats(0.01, 5)
)
def test_no_other_candidate_is_predicted_to_be_better(
    latency_s: float, bytes_per_s: float, backward_s: float
) -> None:
    cost = _cost(latency_s, bytes_per_s)
    arrivals = _arrivals(backward_s)
    choice = choose_bucket_size(_tensors(), arrivals, cost)
    for size in CANDIDATES_MB:
        plans = plan_buckets(_tensors(), size * MIB)
        ready = [max(arrivals[slot.tensor] for slot in plan.slots) for plan in plans]
        times = [cost.fit.time_s(plan.message_bytes(None)) for plan in plans]
        exposed = simulate_buckets(ready, times, backward_s).exposed_s
        assert choice.candidates[size].exposed_s == exposed
        assert choice.candidates[choice.bucket_size_mb].exposed_s <= exposed


def test_costly_calls_make_large_buckets_and_cheap_ones_small() -> None:
    costly = choose_bucket_size(_tensors(), _arrivals(0.5), _cost(0.1, 1e9))
    cheap = choose_bucket_size(_tensors(), _arrivals(0.5), _cost(1e-6, 3e8))
    assert cheap.bucket_size_mb < 10 < costly.bucket_size_mb


def test_starting_calls_costs_and_makes_for_fewer() -> None:
    free = choose_bucket_size(_tensors(), _arrivals(0.5), _cost(1e-6, 3e8))
    priced = choose_bucket_size(_tensors(), _arrivals(0.5), _cost(1e-6, 3e8, start_s=0.05))
    for candidate in priced.candidates.values():
        assert candidate.cost_s == candidate.exposed_s + candidate.num_buckets * 0.05
    chosen = priced.candidates[priced.bucket_size_mb]
    assert chosen.num_buckets < free.candidates[free.bucket_size_mb].num_buckets
    assert chosen.cost_s == min(candidate.cost_s for candidate in priced.candidates.values())


def test_the_choice_explains_itself() -> None:
    text = choose_bucket_size(_tensors(), _arrivals(0.5), _cost(1e-3, 1e8)).explain()
    for part in ("buckets of ", "backward takes 500 ms", "1.00 ms", "100 MB/s", "25 MiB"):
        assert part in text, text
