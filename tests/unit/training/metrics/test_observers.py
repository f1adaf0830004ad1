"""Tests of a run's observers: the log, the file, and several together."""

import pathlib

from paceline.training.metrics import MetricsFile, MetricsRow
from paceline.training.observers import FileObserver, LogObserver, Observers
from tests.unit.training.metrics.row_factory import evaluation_row, expectation, started, step_row


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
