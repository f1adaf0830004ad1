"""Exports a layout and its predictions as a plan for `paceline train --plan`."""

import dataclasses

from paceline.core.plan import Estimate, Plan
from paceline.planner.search.choice import Choice
from paceline.planner.search.question import SearchQuestion


def paceline_plan(choice: Choice, question: SearchQuestion, hardware: str) -> Plan:
    """Returns the plan of a layout.

    Args:
        choice: The layout.
        question: The search question.
        hardware: Device name in the hardware table.
    """
    predictions = {
        "step_time_s": choice.step_time_s,
        "tokens_per_s": Estimate(value=choice.tokens_per_s),
        "peak_bytes": Estimate(value=choice.peak_bytes),
    }
    if choice.mfu is not None:
        predictions["mfu"] = Estimate(value=choice.mfu)
    shape = question.shape
    return Plan(
        model=dataclasses.replace(
            shape, max_context_length=max(shape.max_context_length, question.context_length)
        ),
        batch=choice.batch,
        precision=question.precision,
        layout=choice.layout,
        hardware=hardware,
        predictions=predictions,
        experts=question.experts,
    )
