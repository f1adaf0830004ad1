"""Tests of the accuracy of predictions."""

import pytest

from paceline.core.plan import Estimate
from paceline.predict.backtest import PredictionOutcome, accuracy


def test_accuracy_counts_predictions_and_intervals() -> None:
    found = accuracy(
        [
            PredictionOutcome(predicted=Estimate(value=1.1, low=0.9, high=1.3), measured=1.0),
            PredictionOutcome(predicted=Estimate(value=0.5, low=0.4, high=0.6), measured=1.0),
            PredictionOutcome(predicted=Estimate(value=0.8), measured=1.0),
            PredictionOutcome(predicted=None, measured=1.0),
        ]
    )
    assert (found.num_predicted, found.num_intervals, found.num_inside) == (3, 2, 1)
    assert (found.coverage, found.median_width) == (0.5, pytest.approx((0.2 / 1.1 + 0.2) / 2))
    assert found.median_error == pytest.approx(0.2)
    assert found.largest_error == pytest.approx(0.5)
    alone = accuracy([PredictionOutcome(predicted=Estimate(value=1.0), measured=1.0)])
    assert (alone.coverage, alone.median_width) == (None, None)
