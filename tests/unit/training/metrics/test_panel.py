"""Tests of the terminal panel, at any width and in any encoding."""

import io
from typing import Any

import pytest
from rich.console import Console

from paceline.training.panel import PanelObserver, sparkline
from tests.unit.training.metrics.row_factory import (
    CORRECTED,
    evaluation_row,
    expectation,
    started,
    step_row,
)


def _shown(width: int = 80, encoding: str = "utf-8", **known: Any) -> str:
    """Returns the terminal output after 40 of 100 steps."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    panel = PanelObserver("run", expectation(**known), console)
    panel.log(started())
    for step in range(1, 41):
        panel.log(step_row(step, exposed_communication_s=0.05, memory_bytes=2**29))
    panel.log(evaluation_row(40))
    panel.close()
    file.flush()
    drawn = file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    return drawn[drawn.rindex("run: step") :]


def test_everything_that_is_known_is_shown() -> None:
    shown = _shown(
        step_time_s=0.4, peak_flops_per_s=1e10, memory_limit_bytes=2**30, memory_bytes=2**28
    )
    for text in (
        "run: step 40 of 100",
        "4.6950  falling",
        "norm of the gradients 1.5, learning rate 0.001",
        "held-out  4.5000, 1.2500 bits per byte, at step 40",
        "2 ktokens/s, MFU 20.0%",
        "500 ms (500 ms to 500 ms); predicted 400 ms, measured +25%",
        "data 10 ms (2.0%), exposed communication 50 ms (10.0%)",
        "512.00 MiB of 1.00 GiB (50%); tensors predicted 256.00 MiB",
        "30 s (30 s to 30 s)",
        "started from step 0",
    ):
        assert text in shown, shown


def test_predictions_corrected_by_earlier_runs_have_their_intervals() -> None:
    shown = _shown(width=200, step_time_s=0.4, memory_bytes=2**28, corrected=CORRECTED)
    for text in (
        "; predicted 450 ms (300 ms to 600 ms), measured +11%",
        "512.00 MiB; predicted 512.00 MiB (256.00 MiB to 1.00 GiB)",
    ):
        assert text in shown, shown


def test_what_is_not_known_is_not_shown() -> None:
    shown = _shown()
    assert "MFU" not in shown
    assert "; predicted" not in shown
    assert "512.00 MiB; tensors" in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, _shown(width).splitlines())) <= width


def test_a_terminal_without_blocks_has_none() -> None:
    shown = _shown(encoding="ascii")
    assert "falling" in shown
    assert "step 40 of 100" in shown


def test_a_sparkline_shows_more_than_a_high_beginning() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([99.0, 3.0, 2.0, 2.0, 1.0]) == "██▅▅▁"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""
