"""How much of a long run is training, when devices fail.

A device fails every m hours on average, so that a job on n of them is interrupted every m / n. Each
interruption loses what was done since the last checkpoint, half an interval on average, and the
time of a restart; each checkpoint that stops training costs its own time. With a checkpoint of c
seconds every t seconds and an interruption every M:

    lost share = c / t + t / (2 M) + r / M

which is least at t = sqrt(2 c M) (Young 1974; Daly 2006 refines it for c that is not small beside
M). All functions take arrays.
"""

from typing import Any

import numpy as np

from paceline.accounting.communication.collectives import Numbers

HOUR_S = 3600.0


def interruption_interval_s(device_failure_interval_h: Numbers, num_devices: Any) -> Any:
    """Returns the mean time between interruptions of a job, in seconds."""
    return np.asarray(device_failure_interval_h, dtype=np.float64) * HOUR_S / num_devices


def best_checkpoint_interval_s(checkpoint_s: Numbers, interruption_s: Numbers) -> Any:
    """Returns Young's interval, sqrt(2 c M)."""
    return np.sqrt(2 * np.asarray(checkpoint_s, dtype=np.float64) * interruption_s)


def goodput(
    *,
    checkpoint_s: Numbers,
    checkpoint_interval_s: Numbers,
    restart_s: Numbers,
    interruption_s: Numbers,
) -> Any:
    """Returns the share of time that ends up in the trained model; 0 where all is lost."""
    interval = np.asarray(checkpoint_interval_s, dtype=np.float64)
    between = np.asarray(interruption_s, dtype=np.float64)
    lost = checkpoint_s / interval + (interval / 2 + restart_s) / between
    return np.clip(1 - lost, 0.0, 1.0)
