"""Answer to the scaling-law question: the best model for a compute budget."""

import functools
import pathlib
from collections.abc import Iterator

from paceline.core.finding import Finding
from paceline.course.findings.template import against, make_finding
from paceline.reports.document.model import Block
from paceline.reports.document.pictures import picture_of
from paceline.reports.evidence.groups import Evidence
from paceline.reports.plots.scaling_laws.fitted import SCALING_PLOTS
from paceline.reports.tables.scaling import methods_table, waste_table
from paceline.scaling import decide, diagnose, fit, read_sweep, synthetic_sweep
from paceline.scaling.decide import Answer, Decision
from paceline.scaling.surface import EPOCH

_BUDGETS = (1e23, 1e24)
_LEVEL = 0.9
_NUM_DRAWS = 200
_NOISE = 0.003
"""Noise of the synthetic runs: the spread of repeated runs."""
_PLOTS = ("scaling-profiles", "scaling-laws")
_ADVISED = "lowest_run"


def answer_scaling(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the compute-optimal model size and number of tokens at 1e23 and 1e24 FLOPs."""
    return (_answer(evidence.runs),)


@functools.cache
def _answer(runs: pathlib.Path | None) -> Block:
    if runs is None:
        sweep = synthetic_sweep(EPOCH, noise=_NOISE)
        source = "Synthetic runs from a known loss surface with noise"
    else:
        sweep, source = read_sweep(runs), f"Runs in {runs.name}"
    found = fit(sweep, num_draws=_NUM_DRAWS)
    decisions = decide(found, _BUDGETS, level=_LEVEL)
    return Block(
        heading=f"{source}: {len(found.sweep)} runs, {len(found.sweep.budgets)} budgets",
        tables=(methods_table(found, decisions, _LEVEL), waste_table(decisions[-1])),
        pictures=tuple(
            picture_of(SCALING_PLOTS[name](found), name, name.replace("-", " ").capitalize())
            for name in _PLOTS
        ),
        findings=(
            *(_allocation(decision) for decision in decisions),
            *_methods(decisions[-1]),
            _waste(decisions[-1]),
            *diagnose(found, _BUDGETS, _LEVEL),
        ),
    )


def _by(decision: Decision, method: str) -> Answer | None:
    return next((answer for answer in decision.answers if answer.method == method), None)


def _allocation(decision: Decision) -> Finding:
    best = _by(decision, decision.method) or decision.answers[-1]
    return make_finding(
        "best_allocation",
        "{flops} FLOPs are best spent on {parameters} parameters ({parameters_low} to "
        "{parameters_high}) and {tokens} tokens, {tokens_per_parameter} per parameter, by the "
        "{method} method; this budget is {extrapolation} times the largest budget of the runs.",
        flops=f"{decision.compute:.0e}",
        parameters=best.parameters.value,
        parameters_low=best.parameters.low,
        parameters_high=best.parameters.high,
        tokens=best.tokens.value,
        tokens_per_parameter=best.tokens.value / best.parameters.value,
        method=best.method,
        extrapolation=decision.extrapolation,
    )


def _methods(decision: Decision) -> Iterator[Finding]:
    best, advised = _by(decision, decision.method), _by(decision, _ADVISED)
    if best is not None and advised is not None:
        yield make_finding(
            "lowest_run",
            "Taking the run with the lowest loss at each budget, as the hand-out advises, gives "
            "{parameters} parameters at {flops} FLOPs; the {method} method gives "
            "{fitted_parameters}: {verdict}.",
            "The hand-out's method uses one run per budget, and that run has one of the few sizes "
            "that were trained; a fit uses the loss of every size. Every method computes tokens as "
            "C/(6N).",
            parameters=advised.parameters.value,
            flops=f"{decision.compute:.0e}",
            fitted_parameters=best.parameters.value,
            method=best.method,
            verdict=against(advised.parameters.value, best.parameters.value),
        )


def _waste(decision: Decision) -> Finding:
    worst = max(decision.waste, key=lambda waste: waste.wasted)
    least = min(decision.waste, key=lambda waste: waste.wasted)
    return make_finding(
        "wasted_compute",
        "A model of {parameters} parameters ({reason}) would waste {wasted_share} of the FLOPs; a "
        "model at {least_reason} would waste {least_wasted}: the optimum is flat.",
        parameters=worst.parameters,
        reason=worst.reason,
        wasted_share=worst.wasted,
        least_reason=least.reason,
        least_wasted=f"{max(0.0, least.wasted):.2%}",
    )
