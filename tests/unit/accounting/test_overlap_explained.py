import pytest

from paceline.accounting.overlap import explain_overhead


def test_buckets_that_cost_as_much_to_compute_as_to_send() -> None:
    values = explain_overhead(total_bytes=1e8, bytes_per_s=1e9, latency_s=1e-3).values
    assert values["num_buckets"] == pytest.approx(10)
    assert values["bucket_bytes"] == pytest.approx(1e7)
    assert values["overhead_s"] == pytest.approx(2e-2)


def test_a_backward_of_its_own_length() -> None:
    options = {"total_bytes": 1e8, "bytes_per_s": 1e9, "latency_s": 1e-3}
    long = explain_overhead(**options, backward_s=1.0)
    assert long.values["num_buckets"] == pytest.approx(900)
    assert long.values["overhead_s"] == pytest.approx(1e-3 + 0.1 / 900)
    assert "T = 1 s" in long.render()
