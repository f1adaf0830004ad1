"""Tests that restarts are reported once, before the next step, with their duration."""

import time

from paceline.parallel.ranks.supervisor import Failure, Restart
from paceline.training.metrics import EventRow, MetricsRow, StepRow
from paceline.training.observers import RestartLogger


class _Listener:
    def __init__(self) -> None:
        self.rows: list[MetricsRow] = []
        self.is_closed = False

    def log(self, row: MetricsRow) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.is_closed = True


def _restart(number: int, noticed_s: float) -> Restart:
    failure = Failure(rank=1, exit_code=137, phase="update", step=24 if number == 1 else 0)
    return Restart(
        number=number,
        failure=failure,
        silent_s=0.1,
        noticed_s=noticed_s,
        started_s=noticed_s + 0.25,
    )


def _step(step: int) -> StepRow:
    return StepRow(
        step=step,
        tokens=0,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=1.0,
        step_time_s=1.0,
        data_wait_s=0.0,
        first_sample=0,
        data_digest="",
    )


def test_restarts_are_logged_before_the_first_step() -> None:
    now = time.monotonic()
    listener = _Listener()
    # The first of the two restarts did not reach a step.
    logger = RestartLogger(listener, [_restart(1, now - 3), _restart(2, now - 1)], now - 0.5)
    logger.log(EventRow(step=20, name="started", message=""))
    logger.log(_step(21))
    logger.log(_step(22))
    logger.close()
    assert listener.is_closed
    _, first, second, *steps = listener.rows
    assert [row.step for row in steps] == [21, 22]
    assert isinstance(first, EventRow)
    assert isinstance(second, EventRow)
    message = "from step 20: rank 1 ended with exit code 137, in update after step 24"
    assert (first.step, first.name, first.message) == (20, "restarted", message)
    assert first.time_s is None
    assert second.details is not None
    assert (second.details["restart"], second.details["rank"]) == (2, 1)
    parts = ("wait_s", "rendezvous_s", "load_s", "first_step_s")
    assert second.time_s is not None
    assert abs(second.time_s - sum(float(second.details[part]) for part in parts)) < 1e-6
    assert second.details["wait_s"] == 0.25
    assert second.time_s >= 1


def test_a_run_that_was_not_restarted_logs_nothing() -> None:
    listener = _Listener()
    logger = RestartLogger(listener, (), 0.0)
    logger.log(_step(1))
    assert len(listener.rows) == 1
