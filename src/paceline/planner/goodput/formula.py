"""Goodput in closed form, exact where failures are exponential.

A job of n devices, each of which fails every m hours on average, is interrupted every M = m / n.
It saves after every t seconds of training, which stops training for c seconds; w seconds later the
save is durable. An interruption loses what was done since the newest durable save, and d seconds
pass until training goes on: detection, restart, load. A failure within those begins them again.

Between two moments at which a save becomes durable, t seconds of training are added, and t + c
seconds must pass without a failure; after one, t + c + w must. With failures at a rate 1 / M:

    mean downtime D      = M (e^(d / M) - 1)
    E[time between them] = (M + D) (e^((t + c) / M) - 1) e^(w / M)
    goodput              = t / E

For w = 0 this is Daly's complete model (2006). Neither d nor w moves the best interval, which is
t = M (1 + W(-e^(-1 - c / M))) with Lambert's W, and for small c Young's sqrt(2 c M) (1974).
All functions take arrays.
"""

from typing import Any

import numpy as np
from scipy.special import lambertw

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def interruption_interval_s(device_failure_interval_h: Any, num_devices: Any) -> Any:
    """Returns the mean time between interruptions of a job, in seconds."""
    return np.asarray(device_failure_interval_h, dtype=np.float64) * HOUR_S / num_devices


def young_interval_s(stall_s: Any, interruption_s: Any) -> Any:
    """Returns sqrt(2 c M): the best interval as far as a first-order expansion knows."""
    return np.sqrt(2 * np.asarray(stall_s, dtype=np.float64) * interruption_s)


def best_interval_s(stall_s: Any, interruption_s: Any) -> Any:
    """Returns the seconds of training between saves that make goodput largest."""
    between = np.asarray(interruption_s, dtype=np.float64)
    # Rounding must not lead below -1/e, where W ends: a save that costs nothing is made always.
    argument = np.maximum(-np.exp(-1 - stall_s / between), -np.exp(-1))
    return between * np.maximum(1 + np.nan_to_num(lambertw(argument).real, nan=-1.0), 0.0)


def goodput(
    *,
    interval_s: Any,
    stall_s: Any,
    downtime_s: Any,
    interruption_s: Any,
    write_s: Any = 0.0,
    downtime_interruption_s: Any = None,
) -> Any:
    """Returns the share of time that ends up in the model.

    Args:
        interval_s: Training between two saves.
        stall_s: How long a save stops training.
        downtime_s: From a failure to the next step: detection, restart, load.
        interruption_s: Mean time between interruptions.
        write_s: From the end of the stall until the save could be loaded.
        downtime_interruption_s: Mean time between failures that begin a downtime again, where
            that is not the same.
    """
    interval = np.asarray(interval_s, dtype=np.float64)
    between = np.asarray(interruption_s, dtype=np.float64)
    again = between if downtime_interruption_s is None else np.asarray(downtime_interruption_s)
    # As shares of M, so that a job that is never interrupted (M infinite) needs no special case.
    segment = (interval + stall_s) / between
    with np.errstate(invalid="ignore"):
        mean_downtime = np.where(np.isinf(again), downtime_s, again * np.expm1(downtime_s / again))
        completed = np.where(segment > 0, segment / np.expm1(segment), 1.0)
    up = 1 / (1 + mean_downtime / between)
    return interval / (interval + stall_s) * completed * np.exp(-write_s / between) * up


def equivalent_downtime_s(downtimes_s: Any, weights: Any, interruption_s: Any) -> Any:
    """Returns the one downtime that costs as much as several that occur with these weights."""
    weights = np.asarray(weights, dtype=np.float64)
    survived = (weights * np.exp(-np.asarray(downtimes_s) / interruption_s)).sum()
    return -interruption_s * np.log(survived)


def replica_share(*, pause_s: Any, absence_s: Any, num_replicas: Any, interruption_s: Any) -> Any:
    """Returns the share of the work of a job that loses replicas one by one and goes on.

    A loss stops the survivors for the heartbeat's timeout and the step in flight; the work of the
    lost replica, one of k, is missing until it is healed. On average a / M of them are absent.

    Args:
        pause_s: What a loss costs the survivors.
        absence_s: From the loss of a replica until it trains again.
        num_replicas: How many share the work.
        interruption_s: Mean time between losses.
    """
    between = np.asarray(interruption_s, dtype=np.float64)
    absent = np.minimum(np.asarray(absence_s) / between / num_replicas, 1.0)
    return np.exp(-np.asarray(pause_s) / between) * (1 - absent)
