import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.communication.overlap import (
    balanced_bucket_bytes,
    balanced_overhead_s,
    exposed_s,
    optimal_num_buckets,
    overlap_timeline,
)

_SECONDS = st.floats(0, 10)
_BUCKETS = st.lists(st.tuples(_SECONDS, _SECONDS), max_size=20)


@given(_BUCKETS)
def test_the_timeline_is_the_recurrence(buckets: list[tuple[float, float]]) -> None:
    ready = [ready for ready, _ in buckets]
    communication = [seconds for _, seconds in buckets]
    timeline = overlap_timeline(ready, communication, 5.0)
    finish = 0.0
    for index in range(len(buckets)):
        start = max(ready[index], finish)
        finish = start + communication[index]
        assert timeline.start_s[index] == pytest.approx(start, abs=1e-9)
        assert timeline.finish_s[index] == pytest.approx(finish, abs=1e-9)
    assert timeline.exposed_s == pytest.approx(max(0.0, finish - 5.0), abs=1e-9)


@given(
    total_bytes=st.floats(1e6, 1e10),
    bytes_per_s=st.floats(1e7, 1e11),
    latency_s=st.floats(1e-6, 1e-2),
    backward_s=st.floats(1e-3, 10),
    num_buckets=st.integers(1, 500),
)
def test_the_closed_form_is_the_timeline_of_equal_buckets(
    total_bytes: float, bytes_per_s: float, latency_s: float, backward_s: float, num_buckets: int
) -> None:
    ready = np.arange(1, num_buckets + 1) * backward_s / num_buckets
    communication = np.full(num_buckets, latency_s + total_bytes / num_buckets / bytes_per_s)
    timeline = overlap_timeline(ready, communication, backward_s)
    closed = exposed_s(
        total_bytes=total_bytes,
        bytes_per_s=bytes_per_s,
        latency_s=latency_s,
        backward_s=backward_s,
        num_buckets=num_buckets,
    )
    assert float(closed) == pytest.approx(timeline.exposed_s, rel=1e-6, abs=1e-9)


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
