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
from paceline.loop.directory import ChosenModel, LoopSpec, LoopStoppedError, RuleOfThumb
from paceline.loop.sweep_design import FINAL, find_shape, planned_run
from paceline.loop.sweep_directory import ROWS, SweepDirectory
from paceline.loop.sweep_rules import Rule
from paceline.scaling import ScalingFit, diagnose, fit, read_sweep
from paceline.scaling.design import Posterior, learn_from
from paceline.scaling.model_shapes import rule_of_thumb_parameters
from paceline.scaling.surface import tokens_for

_WIDEST_LOSS = 0.05
"""Largest relative half-width of the loss interval; a wider prediction is useless."""
_WIDEST_SIZE = 10.0
"""Largest ratio of the upper to the lower end of the interval of N."""


def fit_sweep(directory: SweepDirectory) -> ScalingFit:
    """Fits the runs of a sweep."""
    return fit(read_sweep(directory.path / ROWS))


def choose_model(
    spec: LoopSpec, found: ScalingFit, rule: Rule, rule_findings: Sequence[Finding]
) -> ChosenModel:
    """Returns the model for the budget, trained by the rule that the sweep's check found."""
    posterior = learn_from(found.runs)
    parameters = posterior.best_parameters(spec.budget)
    loss = posterior.best_loss(spec.budget)
    extrapolation = spec.budget / float(found.runs.compute.max())
    findings = (*rule_findings, *diagnose(found, [spec.budget]))
    _require_certain(parameters, loss, findings)
    shape = find_shape(spec.sweep, parameters.value)
    if shape is None:
        raise UsageError(
            f"no model with a vocabulary of {spec.vocab_size} has about "
            f"{parameters.value:.3g} parameters; give a larger --budget"
        )
    run = planned_run(spec.sweep, FINAL, FINAL, shape, spec.budget, rule)
    if spec.most_tokens is not None and run.tokens > spec.most_tokens:
        raise LoopStoppedError(
            f"the best model for {spec.budget:.3g} FLOPs trains on {run.tokens:,} tokens, and "
            f"the text allows {spec.most_tokens:,.0f}; prepare more text, raise --epochs, or "
            "lower --budget"
        )
    return ChosenModel(
        run=run,
        parameters=parameters,
        loss=posterior.loss(run.fitted_parameters, run.tokens),
        noise=posterior.noise,
        reason=found.choice.reason,
        extrapolation=extrapolation,
        findings=findings,
        rule_of_thumb=_rule_of_thumb(spec.budget, posterior),
    )


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


def _rule_of_thumb(budget: float, posterior: Posterior) -> RuleOfThumb:
    parameters = rule_of_thumb_parameters(budget)
    return RuleOfThumb(
        parameters=parameters,
        loss=float(posterior.surface.loss(parameters, tokens_for(budget, parameters))),
        wasted=float(posterior.surface.wasted_compute(budget, [parameters])[0]),
    )
