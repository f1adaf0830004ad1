"""Tests of the settings of a chaos run and of its progress."""

import pathlib
import time

import pytest

from paceline.core import UsageError
from paceline.lab.chaos import ChaosConfig, StepProgress
from paceline.lab.faults import Kind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": ()}, "after --"),
        ({"kinds": {}}, "no fault"),
        ({"kinds": {"link-down": Kind(every_s=1.0)}}, "--hosts 2"),
        ({"kinds": {"site-down": Kind(every_s=1.0)}, "hosts_per_site": 2}, "--sites 2 --hosts 1"),
        ({"num_sites": 2}, "add --hosts 1"),
        ({"num_sites": 0}, "at least 1"),
        ({"for_s": 0.0}, "positive"),
    ],
)
def test_what_makes_no_sense(changes: dict[str, object], message: str, tmp_path: object) -> None:
    sensible = {
        "command": ("true",),
        "run": tmp_path,
        "kinds": {"kill": Kind(every_s=30.0)},
        "for_s": 1.0,
    }
    with pytest.raises(UsageError, match=message):
        ChaosConfig(**{**sensible, **changes})  # type: ignore[arg-type]


def test_progress_goes_back_when_a_run_does(tmp_path: pathlib.Path) -> None:
    progress = StepProgress(tmp_path, time.monotonic())
    assert progress.look() == 0
    file = tmp_path / "metrics.jsonl"
    rows = [f'{{"kind":"step","step":{step}}}\n' for step in (1, 2, 3)]
    file.write_text("".join(rows) + '{"kind":"event","step":3}\n{"kind":"st')
    assert progress.look() == 3
    assert progress.advanced_s > 0
    reached = progress.advanced_s
    file.write_text(rows[0])
    assert progress.look() == 1
    assert progress.advanced_s == reached
    assert progress.steps == [0, 3, 3, 1]
