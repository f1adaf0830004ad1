"""How long runs take: predicted from a calibration, or learnt from the runs that have ended."""

from collections.abc import Sequence

import numpy as np

from paceline.workflows.sweep.design import PlannedRun
from paceline.workflows.sweep.directory import RunRow


def expected_time_s(run: PlannedRun, rows: Sequence[RunRow]) -> float | None:
    """Returns the seconds of a run, from those that have ended; None before there are two.

    A start, and seconds per FLOP: small models reach fewer FLOPs per second, so runs count by how
    near they are in size.
    """
    ended = [row for row in rows if row.outcome == "ok"]
    if len(ended) < 2:
        return None
    flops = np.array([row.flops for row in ended])
    seconds = np.array([row.time_s for row in ended])
    distance = np.log([row.num_parameters / run.parameters for row in ended])
    weights = 1 / (1 + distance**2)
    columns = np.stack([np.ones_like(flops), flops / flops.max()])
    # Relative errors count: a run of seconds is not to be missed by those of minutes.
    scale = np.sqrt(weights) / seconds
    start, slope = np.linalg.lstsq((columns * scale).T, seconds * scale, rcond=None)[0]
    return max(float(start + slope * run.flops / flops.max()), float(seconds.min()))
