"""Chooses the model for a budget from the losses of a sweep.

The choice uses the most probable surface given the runs and a prior from published surfaces. Thirty
small runs alone do not determine the irreducible loss, which limits how far a fit extrapolates; the
prior from all published surfaces constrains it. The methods of `paceline scaling fit` are reported
for comparison, with the problems that they find in the runs.
"""

import math
from collections.abc import Sequence

from paceline.core.errors import UsageError
from paceline.core.finding import Finding
from paceline.core.plan import Estimate
from paceline.scaling import ScalingFit, diagnose, fit, read_sweep
from paceline.scaling.candidates import learn_from
from paceline.scaling.design import Belief
from paceline.scaling.model_shapes import rule_of_thumb_parameters
from paceline.scaling.surface import tokens_for
from paceline.workflows.loop.directory import (
    ChosenModel,
    LoopQuestion,
    LoopStoppedError,
    RuleOfThumb,
)
from paceline.workflows.sweep.design import FINAL, find_shape, planned_run
from paceline.workflows.sweep.directory import ROWS, SweepDirectory
from paceline.workflows.sweep.rules import Rule

_NORMAL_90 = 1.645
_WIDEST_LOSS = 0.05
"""Largest relative half-width of the loss interval; a wider prediction is useless."""
_WIDEST_SIZE = 10.0
"""Largest ratio of the upper to the lower end of the interval of N."""


def fit_sweep(directory: SweepDirectory) -> ScalingFit:
    """Fits the runs of a sweep."""
    return fit(read_sweep(directory.path / ROWS))


def choose_model(
    question: LoopQuestion, found: ScalingFit, rule: Rule, rule_findings: Sequence[Finding]
) -> ChosenModel:
    """Returns the model for the budget.

    Args:
        question: The budget and the dataset limits.
        found: The fit of the sweep.
        rule: Learning rate and batch rule of the sweep's runs.
        rule_findings: Findings of the check of the rule.
    """
    belief = learn_from(found.runs)
    parameters = best_size(belief, question.budget)
    loss = best_loss(belief, question.budget)
    extrapolation = question.budget / float(found.runs.compute.max())
    findings = (*rule_findings, *diagnose(found, [question.budget]))
    _require_certain(parameters, loss, findings)
    shape = find_shape(question.sweep, parameters.value)
    if shape is None:
        raise UsageError(
            f"no model with a vocabulary of {question.vocab_size} has about "
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
        loss=belief.loss(run.fitted_parameters, run.tokens),
        noise=belief.noise,
        reason=found.choice.reason,
        extrapolation=extrapolation,
        findings=findings,
        rule_of_thumb=_rule_of_thumb(question.budget, belief),
    )


def best_size(belief: Belief, budget: float) -> Estimate:
    """Returns the best N for a budget, with its 90% interval."""
    size = float(belief.surface.optimal_parameters(budget))
    factor = math.exp(_NORMAL_90 * belief.log_size_deviation(budget))
    return Estimate(value=size, low=size / factor, high=size * factor)


def best_loss(belief: Belief, budget: float) -> Estimate:
    """Returns the loss of the best model for a budget, with the 90% interval for one run."""
    size = float(belief.surface.optimal_parameters(budget))
    return belief.loss(size, float(tokens_for(budget, size)))


def _require_certain(parameters: Estimate, loss: Estimate, findings: Sequence[Finding]) -> None:
    """Stops the loop if the fit is too uncertain for the extrapolation."""
    width, sizes = (
        math.log((each.high or each.value) / (each.low or each.value))
        for each in (loss, parameters)
    )
    doubts = "".join(f"\n  {finding}" for finding in findings)
    if width / 2 > _WIDEST_LOSS:
        raise LoopStoppedError(
            f"the sweep predicts the loss only to ±{width / 2:.1%}, too uncertain to choose a "
            f"model; raise --exploration, or lower --budget. Findings:{doubts}"
        )
    if sizes > math.log(_WIDEST_SIZE):
        raise LoopStoppedError(
            f"the sweep only tells that the best N is between {parameters.low:.3g} and "
            f"{parameters.high:.3g}, too uncertain to choose a model; raise --exploration, or "
            f"lower --budget. Findings:{doubts}"
        )


def _rule_of_thumb(budget: float, belief: Belief) -> RuleOfThumb:
    parameters = rule_of_thumb_parameters(budget)
    return RuleOfThumb(
        parameters=parameters,
        loss=float(belief.surface.loss(parameters, tokens_for(budget, parameters))),
        wasted=float(belief.surface.wasted_compute(budget, [parameters])[0]),
    )
