"""What training runs say of the best model for a budget: the scaling-law question."""

import functools
import pathlib

from paceline.course.findings.phrases import times
from paceline.reports.document.model import Block
from paceline.reports.document.pictures import picture_of
from paceline.reports.evidence.groups import Evidence
from paceline.reports.plots.scaling import SCALING_PLOTS
from paceline.reports.tables.scaling import methods_table, waste_table
from paceline.scaling import LossSurface, Sweep, decide, diagnose, fit, read_sweep, synthetic_sweep
from paceline.scaling.allocation.decide import Answer, Decision

_BUDGETS = (1e23, 1e24)
_LEVEL = 0.9
_NUM_DRAWS = 200
_NOISE = 0.003
_PLOTS = ("scaling-profiles", "scaling-laws")
_CLOSE = 0.1
_BEST, _ADVISED = "parametric", "lowest_run"
# Near to what a replication of published runs found; the noise is that of repeated runs.
_MADE_UP = LossSurface(
    irreducible=1.8,
    parameter_scale=480.0,
    parameter_exponent=0.35,
    token_scale=2000.0,
    token_exponent=0.37,
)


def answer_scaling(evidence: Evidence) -> tuple[Block, ...]:
    """Answers which model and how much data 1e23 and 1e24 FLOPs are best spent on."""
    return (_answer(evidence.runs),)


@functools.cache
def _answer(runs: pathlib.Path | None) -> Block:
    found = fit(_read(runs), num_draws=_NUM_DRAWS)
    decisions = decide(found, _BUDGETS, level=_LEVEL)
    findings = diagnose(found, _BUDGETS, _LEVEL)
    source = (
        "Runs that are made up, from a known surface with noise"
        if runs is None
        else f"The runs of {runs.name}"
    )
    return Block(
        heading=f"{source}: {len(found.sweep)} of them, {len(found.sweep.budgets)} budgets",
        tables=(methods_table(found, decisions, _LEVEL), waste_table(decisions[-1])),
        pictures=tuple(
            picture_of(SCALING_PLOTS[name](found), name, name.replace("-", " ").capitalize())
            for name in _PLOTS
        ),
        findings=(
            *(_budget_sentence(decision) for decision in decisions),
            _method_sentence(decisions[-1]),
            _cost_sentence(decisions[-1]),
            *map(str, findings),
        ),
    )


def _read(runs: pathlib.Path | None) -> Sweep:
    return synthetic_sweep(_MADE_UP, noise=_NOISE) if runs is None else read_sweep(runs)


def _by(decision: Decision, method: str) -> Answer | None:
    return next((answer for answer in decision.answers if answer.method == method), None)


def _budget_sentence(decision: Decision) -> str:
    best = _by(decision, _BEST) or decision.answers[-1]
    parameters, tokens = best.parameters, best.tokens
    return (
        f"{decision.compute:.0e} FLOPs are best spent on {parameters.value:.3g} parameters "
        f"({parameters.low:.3g} to {parameters.high:.3g}) and {tokens.value:.3g} tokens, "
        f"{tokens.value / parameters.value:.3g} per parameter, by the {best.method} method; that "
        f"is {times(decision.extrapolation)} the largest budget that was tried."
    )


def _method_sentence(decision: Decision) -> str:
    best, advised = _by(decision, _BEST), _by(decision, _ADVISED)
    if best is None or advised is None:
        return "Not every method could be used, so they are not compared."
    ratio = advised.parameters.value / best.parameters.value
    if abs(ratio - 1) < _CLOSE:
        meaning = "the two agree, so the shape of the profiles adds little here"
    else:
        meaning = (
            "it throws away the shape of every profile and keeps one run of each, whose size is "
            "one of the few that were tried"
        )
    return (
        f"Taking the lowest run of each budget, as the hand-out advises, gives "
        f"{advised.parameters.value:.3g} parameters at {decision.compute:.0e} FLOPs, "
        f"{times(ratio)} the fitted surface's: {meaning}. Tokens are C/6N in every method, so that "
        "N and D cannot contradict each other."
    )


def _cost_sentence(decision: Decision) -> str:
    worst = max(decision.waste, key=lambda waste: waste.wasted)
    least = min(decision.waste, key=lambda waste: waste.wasted)
    return (
        f"A model of {worst.parameters:.3g} parameters, {worst.reason}, would waste "
        f"{worst.wasted:.1%} of the FLOPs; {least.reason} wastes {least.wasted:.2%}: the optimum "
        "is flat, and being off by a little costs almost nothing."
    )
