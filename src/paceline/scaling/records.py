"""Converts decisions, designs, runs and claims to records."""

import dataclasses
import math
from collections.abc import Sequence

from paceline.core.finding import Finding
from paceline.core.plan import Estimate
from paceline.records import Metric, Record, capture_environment
from paceline.scaling.candidates import Candidate
from paceline.scaling.claims import AllocationCost
from paceline.scaling.decide import Decision
from paceline.scaling.design import Belief
from paceline.scaling.surface import compute_for, tokens_for

_NORMAL_90 = 1.645
"""Half-width of a 90% interval of a normal distribution, in standard deviations."""


def decision_records(decisions: Sequence[Decision], findings: Sequence[Finding]) -> list[Record]:
    """Returns a record per method and budget, with the findings as warnings."""
    environment = capture_environment()
    warnings = tuple(str(finding) for finding in findings)
    return [
        Record(
            kind="scaling",
            case={"method": answer.method, "compute_budget": answer.compute},
            environment=environment,
            metrics={
                "parameters": Metric.from_estimate(answer.parameters),
                "tokens": Metric.from_estimate(answer.tokens),
                "loss": Metric.from_estimate(answer.loss),
            },
            outcome="ok",
            warnings=warnings,
        )
        for decision in decisions
        for answer in decision.answers
    ]


def design_record(belief: Belief, target: float) -> Record:
    """Returns the belief about the best model for a target after a design's runs."""
    size, factor = _best_size(belief, target)
    parameters = Estimate(value=size, low=size / factor, high=size * factor)
    tokens = tokens_for(target, [size, size * factor, size / factor]).tolist()
    return Record(
        kind="scaling",
        case={"method": "design", "compute_budget": target},
        environment=capture_environment(),
        metrics={
            "parameters": Metric.from_estimate(parameters),
            "tokens": Metric(value=tokens[0], low=tokens[1], high=tokens[2]),
            "loss": Metric(value=float(belief.surface.optimal_loss(target))),
        },
        outcome="ok",
    )


def describe_design(belief: Belief, target: float) -> str:
    """Describes the best N of `design_record` in a line, with its interval and assumed noise."""
    size, factor = _best_size(belief, target)
    return (
        f"N at {target:.3g} FLOPs: {size:.3g}, known to within a factor of {factor:.3g} (90%) if "
        f"repeated losses agree to {belief.noise:.1%}"
    )


def _best_size(belief: Belief, target: float) -> tuple[float, float]:
    """Returns the best N for a target, and the factor of its 90% interval."""
    size = float(belief.surface.optimal_parameters(target))
    return size, math.exp(_NORMAL_90 * belief.log_size_deviation(target))


def run_record(run: Candidate, loss: float | None = None, **details: int | float) -> Record:
    """Returns the record of a proposed run, or of a finished run if `loss` is given.

    `details` are added to the case, such as the shape of the model.
    """
    metrics = {"parameters": run.parameters, "tokens": run.tokens, "cost": run.cost}
    if loss is not None:
        metrics["final_loss"] = loss
    compute = float(compute_for(run.parameters, run.tokens))
    return Record(
        kind="scaling_run",
        case={"compute_budget": compute, "parameters": run.parameters, **details},
        environment=capture_environment(),
        metrics={name: Metric(value=value) for name, value in metrics.items()},
        outcome="ok",
    )


def claim_record(
    budget: float,
    parameters: float | None,
    tokens: float | None,
    cost: AllocationCost | None,
    findings: Sequence[Finding],
) -> Record:
    """Returns the record of a claim that was checked against runs; findings become warnings."""
    metrics = {} if cost is None else dataclasses.asdict(cost)
    metrics |= {"parameters": parameters, "tokens": tokens}
    return Record(
        kind="scaling",
        case={"method": "claim", "compute_budget": budget},
        environment=capture_environment(),
        metrics={name: Metric(value=value) for name, value in metrics.items() if value is not None},
        outcome="ok",
        warnings=tuple(f"{finding.name}: {finding.message}" for finding in findings),
    )
