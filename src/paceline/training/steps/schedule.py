"""Learning-rate schedule: a pure function from step number to a factor of the peak."""

import math

from paceline.training.config import ScheduleConfig


def learning_rate_factor(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """Returns the learning-rate factor of a step.

    Warm-up rises linearly and reaches the peak at its last step. A decay ends at the last step of
    the run, with the schedule's final fraction.

    Args:
        schedule: Config of the schedule.
        step: Step number, from 0.
        num_steps: Total number of steps of the run.
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
