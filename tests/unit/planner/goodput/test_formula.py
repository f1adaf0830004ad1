import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planner.goodput.scenario import best_interval_s, goodput, interruption_interval_s


def test_a_published_rate() -> None:
    # 16,384 devices over 54 days with 419 interruptions: one per three hours, as reported.
    between = interruption_interval_s(54 * 24 * 16_384 / 419, 16_384)
    assert between / 3600 == pytest.approx(3.09, abs=0.01)


@given(st.floats(0.01, 600), st.floats(1e3, 1e6), st.floats(0, 600), st.floats(0, 60))
def test_no_other_interval_is_better(
    stall: float, between: float, downtime: float, write: float
) -> None:
    best = best_interval_s(stall, between)
    shares = goodput(
        interval_s=best * np.geomspace(0.1, 10, 41),
        stall_s=stall,
        downtime_s=downtime,
        interruption_s=between,
        write_s=write,
    )
    assert shares.argmax() == 20 or shares.max() == pytest.approx(shares[20], rel=1e-9)


def test_youngs_interval_is_the_limit_of_rare_failures() -> None:
    assert best_interval_s(1.0, 1e7) == pytest.approx(np.sqrt(2 * 1.0 * 1e7), rel=1e-3)
    # With failures every ten minutes and saves of one minute, Young's interval is a tenth too long.
    assert best_interval_s(60.0, 600.0) < 0.91 * np.sqrt(2 * 60.0 * 600.0)


def test_a_save_that_costs_nothing_is_made_always() -> None:
    assert best_interval_s(0.0, np.array([600.0, 1e7])) == pytest.approx([0.0, 0.0], abs=1.0)


def test_the_first_order_is_the_limit_of_rare_failures() -> None:
    interval, stall, downtime, between = 300.0, 2.0, 100.0, 1e6
    lost = stall / (interval + stall) + ((interval + stall) / 2 + downtime) / between
    reached = goodput(
        interval_s=interval, stall_s=stall, downtime_s=downtime, interruption_s=between
    )
    assert reached == pytest.approx(1 - lost, abs=1e-5)


def test_without_failures_only_saves_cost() -> None:
    reached = goodput(interval_s=90.0, stall_s=10.0, downtime_s=600.0, interruption_s=math.inf)
    assert reached == pytest.approx(0.9)


def test_a_job_that_never_gets_anywhere() -> None:
    reached = goodput(interval_s=3600.0, stall_s=0.0, downtime_s=600.0, interruption_s=60.0)
    assert 0 < reached < 1e-20
