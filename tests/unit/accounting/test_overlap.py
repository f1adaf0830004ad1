import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.overlap import (
    balanced_bucket_bytes,
    balanced_overhead_s,
    exposed_s,
    optimal_num_buckets,
    simulate_buckets,
)


@given(
    total_bytes=st.floats(1e6, 1e10),
    bytes_per_s=st.floats(1e7, 1e11),
    latency_s=st.floats(1e-6, 1e-2),
    backward_s=st.floats(1e-3, 10),
    num_buckets=st.integers(1, 500),
)
def test_the_closed_form_is_the_simulation_of_equal_buckets(
    total_bytes: float, bytes_per_s: float, latency_s: float, backward_s: float, num_buckets: int
) -> None:
    ready = [index * backward_s / num_buckets for index in range(1, num_buckets)]
    transfers = [latency_s + total_bytes / num_buckets / bytes_per_s] * num_buckets
    simulated = simulate_buckets([*ready, backward_s], transfers, backward_s)
    closed = exposed_s(
        total_bytes=total_bytes,
        bytes_per_s=bytes_per_s,
        latency_s=latency_s,
        backward_s=backward_s,
        num_buckets=num_buckets,
    )
    assert float(closed) == pytest.approx(simulated.exposed_s, rel=1e-6, abs=1e-9)


@given(
    total_bytes=st.floats(1e6, 1e10),
    bytes_per_s=st.floats(1e7, 1e11),
    latency_s=st.floats(1e-5, 1e-2),
    backward_s=st.floats(1e-3, 10),
)
def test_no_other_number_of_buckets_is_better(
    total_bytes: float, bytes_per_s: float, latency_s: float, backward_s: float
) -> None:
    given_ = {
        "total_bytes": total_bytes,
        "bytes_per_s": bytes_per_s,
        "latency_s": latency_s,
        "backward_s": backward_s,
    }
    best = optimal_num_buckets(**given_)
    others = np.concatenate([np.geomspace(1, 1e6, 4000), [best]])
    least = float(exposed_s(**given_, num_buckets=others).min())
    assert float(exposed_s(**given_, num_buckets=best)) == pytest.approx(least, rel=1e-6)


def test_the_balanced_case_of_the_courses() -> None:
    line = {"total_bytes": 4e8, "bytes_per_s": 1e10, "latency_s": 1e-4}
    # sqrt(s w o) = sqrt(4e8 * 1e10 * 1e-4) = 2e7 bytes: 20 buckets, and 2 sqrt(s o / w) = 4 ms.
    assert balanced_bucket_bytes(**line) == pytest.approx(2e7)
    assert float(balanced_overhead_s(**line, num_buckets=20)) == pytest.approx(4e-3)
    general = exposed_s(**line, backward_s=4e-2, num_buckets=[5, 20, 80])
    assert general.tolist() == pytest.approx(
        balanced_overhead_s(**line, num_buckets=[5, 20, 80]).tolist()
    )
    assert optimal_num_buckets(**line, backward_s=4e-2) == pytest.approx(20)
