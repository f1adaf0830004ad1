"""Predicts the duration of runs from those that have ended."""

from collections.abc import Sequence

import numpy as np

from paceline.workflows.sweep.design import PlannedRun
from paceline.workflows.sweep.directory import RunRow


def expected_time_s(run: PlannedRun, rows: Sequence[RunRow]) -> float | None:
    """Returns the expected duration of a run from uninterrupted runs; None from fewer than two.

    The model is a start-up time plus seconds per FLOP. Small models reach fewer FLOP/s, so runs are
    weighted by their similarity in size.
    """
    ended = [row for row in rows if row.outcome == "ok" and not row.is_resumed]
    if len(ended) < 2:
        return None
    flops = np.array([row.flops for row in ended])
    seconds = np.array([row.time_s for row in ended])
    distance = np.log([row.num_parameters / run.parameters for row in ended])
    weights = 1 / (1 + distance**2)
    columns = np.stack([np.ones_like(flops), flops / flops.max()])
    # Minimise relative errors, so that long runs do not dominate short ones.
    scale = np.sqrt(weights) / seconds
    start, slope = np.linalg.lstsq((columns * scale).T, seconds * scale, rcond=None)[0]
    return max(float(start + slope * run.flops / flops.max()), float(seconds.min()))
