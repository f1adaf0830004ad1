"""Table of framework calibrations: achieved shares of peak rates, and held-out errors."""

from collections.abc import Sequence

import numpy as np

from paceline.planner.calibrations.calibration import FrameworkCalibration
from paceline.reports.tables.table import Table

_NOT_HELD_OUT = "-"


def calibrations_table(calibrations: Sequence[FrameworkCalibration]) -> Table:
    """Returns a row per calibration."""
    return Table(
        headers=(
            *("calibration", "rows", "matmuls (of peak)", "attention (of peak)"),
            *("memory (of bandwidth)", "held-out error, mean", "largest", "90% interval"),
        ),
        rows=tuple(_row(each) for each in calibrations),
        caption="Shares of what the vendor states; errors of rows while their model was held out",
    )


def _row(calibration: FrameworkCalibration) -> tuple[str, ...]:
    constants = calibration.constants
    attention = constants.get("attention_share")
    ratios = np.array([each.log_ratio for each in calibration.residuals])
    if len(ratios):
        errors = np.abs(np.exp(-ratios) - 1)
        half = np.exp(calibration.half_width()) - 1
        figures = (f"{errors.mean():.1%}", f"{errors.max():.1%}", f"±{half:.1%}")
    else:
        figures = (_NOT_HELD_OUT, _NOT_HELD_OUT, "unknown: one model, one number of devices")
    return (
        calibration.name,
        f"{len(calibration.rows)}",
        f"{constants['matmul_share']:.0%}",
        "as matmuls" if attention is None else f"{attention:.0%}",
        f"{constants['memory_share']:.0%}",
        *figures,
    )
