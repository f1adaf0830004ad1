import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.goodput import best_checkpoint_interval_s, goodput, interruption_interval_s


def test_a_published_run() -> None:
    # 16,384 devices over 54 days with 419 interruptions: one in three hours, as was reported.
    failure_interval_h = 54 * 24 * 16_384 / 419
    between = interruption_interval_s(failure_interval_h, 16_384)
    assert between / 3600 == pytest.approx(3.09, abs=0.01)
    interval = best_checkpoint_interval_s(30.0, between)
    reached = goodput(
        checkpoint_s=30.0, checkpoint_interval_s=interval, restart_s=600.0, interruption_s=between
    )
    # They reported over 90%; a minute of checkpoint and ten of restart would allow it.
    assert 0.85 < reached < 0.95


@given(st.floats(1, 600), st.floats(1e4, 1e6), st.floats(0, 600))
def test_no_other_interval_is_better(checkpoint: float, between: float, restart: float) -> None:
    best = best_checkpoint_interval_s(checkpoint, between)
    intervals = best * np.geomspace(0.1, 10, 41)
    shares = goodput(
        checkpoint_s=checkpoint,
        checkpoint_interval_s=intervals,
        restart_s=restart,
        interruption_s=between,
    )
    assert shares.argmax() == 20 or shares.max() == pytest.approx(shares[20], abs=1e-12)


def test_a_job_that_never_gets_anywhere() -> None:
    assert (
        goodput(checkpoint_s=100.0, checkpoint_interval_s=50.0, restart_s=0.0, interruption_s=1e9)
        == 0.0
    )
