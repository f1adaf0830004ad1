"""Tests of the summary of a run's rows."""

import pytest

from paceline.records import Metric
from paceline.training.metrics import (
    EventRow,
    MetricsRow,
    evenly,
    phase_times,
    run_metrics,
    steady_steps,
)
from tests.unit.training.row_factory import (
    CORRECTED,
    evaluation_row,
    expectation,
    started,
    step_row,
)


def _saved(step: int) -> EventRow:
    return EventRow(step=step, name="saved", message=".", time_s=1.0)


def _rows() -> list[MetricsRow]:
    """Returns the rows of a run that was killed and resumed from its checkpoint at step 3."""
    return [
        started(),
        step_row(1, step_time_s=5.0),
        step_row(2, exposed_communication_s=0.1, memory_bytes=300),
        step_row(3),
        evaluation_row(3),
        _saved(3),
        started(3),
        step_row(4, step_time_s=5.0, exposed_communication_s=0.3, memory_bytes=200),
        evaluation_row(4),
        step_row(5, step_time_s=2.5),
        step_row(6),
        evaluation_row(6, loss=4.0, bits_per_byte=1.0),
        _saved(6),
    ]


def test_time_goes_to_phases_and_adds_up() -> None:
    times = phase_times(_rows())
    assert times.evaluation_s == 6.0
    assert times.checkpoint_s == 2.0
    assert times.data_wait_s == pytest.approx(0.06)
    assert times.exposed_communication_s == pytest.approx(6 * 0.2)
    # Only the evaluation after step 4 is part of the 14 s of steps.
    assert times.compute_s == pytest.approx(14 - 0.06 - 1.2 - 2.0)
    assert times.total_s == pytest.approx(14 + 4 + 2)


def test_steps_that_warm_up_or_follow_an_evaluation_do_not_count() -> None:
    assert [row.step for row in steady_steps(_rows())] == [2, 3, 6]


def test_metrics_have_what_is_known() -> None:
    metrics = run_metrics(_rows(), expectation(step_time_s=0.4, peak_flops_per_s=1e10))
    values = {name: metric.value for name, metric in metrics.items()}
    assert values == {
        "loss": pytest.approx(5 - 0.035),
        "tokens": 6000,
        "step_time_s": 0.5,
        "tokens_per_s": 2000,
        "heldout_loss": 4.0,
        "bits_per_byte": 1.0,
        "predicted_step_time_s": 0.4,
        "model_flops_utilization": 0.2,
        "exposed_communication_s": pytest.approx(0.2),
        "memory_bytes": 300,
        "predicted_memory_bytes": 2**20,
    }
    assert metrics["step_time_s"].samples == (0.5, 0.5, 0.5)
    few = run_metrics([started(), step_row(1)], expectation())
    assert set(few) == {"loss", "tokens", "step_time_s", "tokens_per_s"}
    assert run_metrics([started()], expectation()) == {}


def test_predictions_are_recorded_with_their_intervals() -> None:
    metrics = run_metrics(_rows(), expectation(step_time_s=0.4, corrected=CORRECTED))
    for predicted, quantity in (
        ("predicted_step_time_s", "step_time_s"),
        ("predicted_memory_bytes", "memory_bytes"),
    ):
        assert metrics[predicted] == Metric.from_estimate(CORRECTED[quantity])


def test_long_runs_keep_some_of_their_samples() -> None:
    assert evenly([1.0, 2.0], 3) == [1.0, 2.0]
    assert evenly([float(number) for number in range(10)], 4) == [0.0, 2.0, 5.0, 7.0]
