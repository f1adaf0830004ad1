"""Goodput in closed form, exact for exponentially distributed failures.

A job of n devices, each of which fails every m hours on average, is interrupted every M = m / n.
After every t seconds of training it saves, which stops training for c seconds. The save is durable
w seconds later. An interruption loses the work since the newest durable save. Training resumes
after d seconds of detection, restart and load. A failure during this downtime restarts it.

From one durable save to the next, t seconds of training are added. This takes t + c seconds without
a failure, or t + c + w seconds after a failure. With failures at a rate 1 / M:

    mean downtime D      = M (e^(d / M) - 1)
    E[time between them] = (M + D) (e^((t + c) / M) - 1) e^(w / M)
    goodput              = t / E

For w = 0 this is Daly's complete model (2006). The optimal interval depends on neither d nor w. It
is t = M (1 + W(-e^(-1 - c / M))) with Lambert's W, and for small c Young's sqrt(2 c M) (1974).
All functions accept arrays.
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
    """Returns sqrt(2 c M), the first-order approximation of the optimal interval."""
    return np.sqrt(2 * np.asarray(stall_s, dtype=np.float64) * interruption_s)


def best_interval_s(stall_s: Any, interruption_s: Any) -> Any:
    """Returns the seconds of training between saves that maximize goodput."""
    between = np.asarray(interruption_s, dtype=np.float64)
    # W is undefined below -1/e, which rounding could reach. A save without a stall gives t = 0.
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
    """Returns the fraction of time that is useful training.

    Args:
        interval_s: Training time between two saves.
        stall_s: Time for which a save stops training.
        downtime_s: Time from a failure to the next step: detection, restart, load.
        interruption_s: Mean time between interruptions.
        write_s: Time from the end of the stall until the save can be loaded.
        downtime_interruption_s: Mean time between failures that restart a downtime, if it differs
            from `interruption_s`.
    """
    interval = np.asarray(interval_s, dtype=np.float64)
    between = np.asarray(interruption_s, dtype=np.float64)
    again = between if downtime_interruption_s is None else np.asarray(downtime_interruption_s)
    # Relative to M, so that a job without interruptions (infinite M) needs no special case.
    segment = (interval + stall_s) / between
    with np.errstate(invalid="ignore"):
        mean_downtime = np.where(np.isinf(again), downtime_s, again * np.expm1(downtime_s / again))
        completed = np.where(segment > 0, segment / np.expm1(segment), 1.0)
    up = 1 / (1 + mean_downtime / between)
    return interval / (interval + stall_s) * completed * np.exp(-write_s / between) * up


def equivalent_downtime_s(downtimes_s: Any, weights: Any, interruption_s: Any) -> Any:
    """Returns the single downtime with the same cost as several that occur with these weights."""
    weights = np.asarray(weights, dtype=np.float64)
    survived = (weights * np.exp(-np.asarray(downtimes_s) / interruption_s)).sum()
    return -interruption_s * np.log(survived)


def replica_share(*, pause_s: Any, absence_s: Any, num_replicas: Any, interruption_s: Any) -> Any:
    """Returns the fraction of work done by a job that continues when it loses single replicas.

    A loss stops the survivors for the heartbeat timeout and the step in flight. The work of the
    lost replica, one of k, is missing until it heals. With an absence of a seconds, a / M replicas
    are absent on average.

    Args:
        pause_s: Time that a loss costs the survivors.
        absence_s: Time from the loss of a replica until it trains again.
        num_replicas: Number of replicas that share the work.
        interruption_s: Mean time between losses.
    """
    between = np.asarray(interruption_s, dtype=np.float64)
    absent = np.minimum(np.asarray(absence_s) / between / num_replicas, 1.0)
    return np.exp(-np.asarray(pause_s) / between) * (1 - absent)
