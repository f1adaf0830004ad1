"""Tests of observers: file, log, several of them, and the restarts that they are told of."""

import pathlib
import time

from paceline.parallel.ranks.supervisor import Failure, Restart
from paceline.training.metrics import EventRow, MetricsFile, MetricsRow, StepRow
from paceline.training.observers import FileObserver, LogObserver, Observers, RestartLogger
from tests.unit.training.row_factory import evaluation_row, expectation, started, step_row


class _Fragile:
    """Fails at one step and on closing."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.steps: list[int] = []

    def log(self, row: MetricsRow) -> None:
        if row.step == self._step:
            raise OSError("disk\nfull")
        self.steps.append(row.step)

    def close(self) -> None:
        raise RuntimeError


def test_a_log_has_the_mean_of_a_few_steps_and_what_was_predicted() -> None:
    lines: list[str] = []
    log = LogObserver(2, expectation(step_time_s=0.4), lines.append)
    for row in (step_row(1, loss=4.0), step_row(2, loss=2.0), evaluation_row(2), started(2)):
        log.log(row)
    assert lines == [
        "step 2 of 100  loss 3.0000  norm 1.5  lr 0.001  2 ktokens/s  step 500 ms "
        "(predicted 400 ms)  left 49 s\n",
        "step 2  held-out loss 4.5000, 1.2500 bits per byte\n",
        "paceline: started from step 2\n",
    ]


def test_who_fails_is_named_once_and_the_others_go_on() -> None:
    lines: list[str] = []
    fragile, steady = _Fragile(2), _Fragile(99)
    observers = Observers([fragile, steady], lines.append)
    for step in (1, 2, 3):
        observers.log(step_row(step))
    assert (fragile.steps, steady.steps) == ([1], [1, 2, 3])
    observers.close()
    observers.close()
    assert lines == [
        "paceline: _Fragile failed at step 2 and gets no more metrics; training continues: disk "
        "full\n",
        "paceline: _Fragile failed at the end and gets no more metrics; training continues: "
        "RuntimeError\n",
    ]


def test_a_resumed_run_forgets_what_it_makes_again(tmp_path: pathlib.Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    observer = FileObserver(metrics)
    rows = [started(), step_row(1, memory_bytes=5), step_row(2), started(1), step_row(2, loss=1.0)]
    for row in rows:
        observer.log(row)
    assert list(metrics.read()) == [rows[0], rows[1], rows[3], rows[4]]


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
