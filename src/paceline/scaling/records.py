"""Converts decisions, designs, runs and claims to records."""

import dataclasses
from collections.abc import Sequence

from paceline.core.finding import Finding
from paceline.records import Metric, Record, capture_environment
from paceline.records.schema import interval_ends
from paceline.scaling.claims import AllocationCost
from paceline.scaling.decide import Decision
from paceline.scaling.design import Candidate, Posterior
from paceline.scaling.surface import compute_for, tokens_for


def decision_records(decisions: Sequence[Decision], findings: Sequence[Finding]) -> list[Record]:
    """Returns a record per method and budget, with the findings as warnings."""
    environment = capture_environment()
    warnings = tuple(str(finding) for finding in findings)
    return [
        Record(
            kind="scaling",
            case={"method": answer.method, "compute_budget": decision.compute},
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


def design_record(posterior: Posterior, target: float) -> Record:
    """Returns the best model for a target, as known after a design's runs."""
    best = posterior.best_parameters(target)
    smallest, largest = interval_ends(best)
    # The largest model trains on the fewest tokens.
    tokens = tokens_for(target, (best.value, largest, smallest)).tolist()
    return Record(
        kind="scaling",
        case={"method": "design", "compute_budget": target},
        environment=capture_environment(),
        metrics={
            "parameters": Metric.from_estimate(best),
            "tokens": Metric(value=tokens[0], low=tokens[1], high=tokens[2]),
            "loss": Metric(value=float(posterior.surface.optimal_loss(target))),
        },
        outcome="ok",
    )


def describe_design(posterior: Posterior, target: float) -> str:
    """Describes the best N of `design_record` in a line, with its interval and assumed noise."""
    best = posterior.best_parameters(target)
    factor = interval_ends(best)[1] / best.value
    return (
        f"N at {target:.3g} FLOPs: {best.value:.3g}, known to within a factor of {factor:.3g} "
        f"(90%) if repeated losses agree to {posterior.noise:.1%}"
    )


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
