"""The learning rate of each step, as a factor of its peak: a pure function of the step's number."""

import math

from paceline.training.config import ScheduleConfig


def learning_rate_factor(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """Returns the factor of a step, the first of which is 0.

    Warm-up rises linearly and reaches the peak with its last step. The last step of the run has
    the schedule's final fraction.

    Args:
        schedule: Which curve.
        step: The step, from 0.
        num_steps: Steps of the whole run.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return 1.0
    decay_steps = num_steps - schedule.warmup_steps
    if schedule.name == "wsd":
        decay_steps = min(decay_steps, math.ceil(schedule.decay_fraction * num_steps))
    num_left = num_steps - 1 - step
    if num_left >= decay_steps:
        return 1.0
    is_left = num_left / max(1, decay_steps)
    if schedule.name == "cosine":
        is_left = (1 - math.cos(math.pi * is_left)) / 2
    return schedule.final_fraction + (1 - schedule.final_fraction) * is_left
