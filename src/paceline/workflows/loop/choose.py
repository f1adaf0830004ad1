"""From the losses of a sweep to the model that a budget is spent on."""

import math
from collections.abc import Sequence

import numpy as np

from paceline.core.errors import PacelineError, UsageError
from paceline.core.finding import Finding
from paceline.core.plan import Estimate
from paceline.scaling import ScalingFit, diagnose, fit, read_sweep
from paceline.scaling.checks.claims import check_allocation
from paceline.scaling.fits.held_out import RUNS_REPEAT_TO
from paceline.scaling.fits.prediction import predict
from paceline.scaling.surface import tokens_for
from paceline.workflows.loop.directory import ChosenModel, LoopQuestion, RuleOfThumb
from paceline.workflows.sweep.design import FINAL, find_shape, planned_run
from paceline.workflows.sweep.directory import ROWS, SweepDirectory
from paceline.workflows.sweep.rules import Rule

TOKENS_PER_PARAMETER = 20
"""Chinchilla's rule of thumb."""
_NORMAL_90 = 1.645
_WIDEST_LOSS = 0.05
"""Half of the interval of the loss, relative; beyond it a prediction is none."""
_WIDEST_SIZE = 10.0
"""Upper over lower end of the interval of N."""


class LoopStoppedError(PacelineError):
    """A loop that ends before the large run, because the small ones do not tell enough."""


def fit_sweep(directory: SweepDirectory) -> ScalingFit:
    """Fits the runs of a sweep."""
    return fit(read_sweep(directory.path / ROWS))


def choose_model(
    question: LoopQuestion, found: ScalingFit, rule: Rule, rule_findings: Sequence[Finding]
) -> ChosenModel:
    """Returns the model for the budget.

    Args:
        question: The budget, and the text.
        found: The fit of the sweep.
        rule: Learning rate and batch, as the sweep's runs had them.
        rule_findings: What the check of the rule has found.
    """
    budget = np.array([question.budget])
    answer = predict(found.chosen, budget)
    parameters = answer.parameters.at(0)
    loss = with_noise(answer.loss.at(0), found)
    extrapolation = question.budget / float(found.sweep.compute.max())
    findings = (*rule_findings, *diagnose(found, [question.budget]))
    _require_certain(parameters, loss, findings)
    shape = find_shape(question.sweep, parameters.value)
    if shape is None:
        raise UsageError(
            f"no model of a vocabulary of {question.vocab_size} has about "
            f"{parameters.value:.3g} parameters; give a larger --budget"
        )
    run = planned_run(question.sweep, FINAL, FINAL, shape, question.budget, rule)
    if run.tokens > question.most_tokens:
        raise LoopStoppedError(
            f"the best model for {question.budget:.3g} FLOPs trains on {run.tokens:,} tokens, and "
            f"the text allows {question.most_tokens:,.0f}; prepare more text, raise --epochs, or "
            "lower --budget"
        )
    return ChosenModel(
        run=run,
        parameters=parameters,
        loss=loss,
        method=found.choice.method,
        reason=found.choice.reason,
        extrapolation=extrapolation,
        findings=findings,
        rule_of_thumb=_rule_of_thumb(question.budget, found),
    )


def with_noise(loss: Estimate, found: ScalingFit) -> Estimate:
    """Widens the interval of a curve to that of one run on it.

    A run scatters about the curve, at least as far as runs repeat, and the method was off by so
    much at the budgets that it was not shown.
    """
    noise = found.parametric.noise if found.has_surface else 0.0
    apart = max(_NORMAL_90 * noise, RUNS_REPEAT_TO, found.choice.error or 0.0)

    def wider(end: float | None) -> float:
        fitted = 0.0 if end is None else math.log(end / loss.value)
        return math.hypot(fitted, apart)

    return Estimate(
        value=loss.value,
        low=loss.value * math.exp(-wider(loss.low)),
        high=loss.value * math.exp(wider(loss.high)),
    )


def _require_certain(parameters: Estimate, loss: Estimate, findings: Sequence[Finding]) -> None:
    """Stops where the fit cannot carry the extrapolation."""
    width, sizes = (
        math.log((each.high or each.value) / (each.low or each.value))
        for each in (loss, parameters)
    )
    doubts = "".join(f"\n  {finding}" for finding in findings)
    if width / 2 > _WIDEST_LOSS:
        raise LoopStoppedError(
            f"the sweep predicts the loss only to ±{width / 2:.1%}, which carries no decision; "
            f"raise --exploration, or lower --budget. What is doubtful:{doubts}"
        )
    if sizes > math.log(_WIDEST_SIZE):
        raise LoopStoppedError(
            f"the sweep leaves the best N between {parameters.low:.3g} and {parameters.high:.3g}, "
            f"which carries no decision; raise --exploration, or lower --budget. What is doubtful:"
            f"{doubts}"
        )


def _rule_of_thumb(budget: float, found: ScalingFit) -> RuleOfThumb | None:
    if not found.has_surface:
        return None
    parameters = math.sqrt(budget / (6 * TOKENS_PER_PARAMETER))
    cost, _ = check_allocation(found, budget, parameters, float(tokens_for(budget, parameters)))
    return RuleOfThumb(parameters=parameters, loss=cost.loss, wasted=cost.wasted)
