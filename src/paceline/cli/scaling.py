"""``paceline scaling``: from the losses of small runs to the size of a large one."""

import dataclasses
import math
import pathlib
from typing import TYPE_CHECKING, Annotated

import tyro

from paceline.cli.output import OutputOptions, print_json, stderr_console, stdout_console
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.finding import Finding
    from paceline.records import Record
    from paceline.scaling import ScalingFit
    from paceline.scaling.experiments.design import Belief

_Runs = Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUNS")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How runs are fitted."""

    draws: int = 1000
    """Bootstrap replicates that intervals are made of."""
    seed: int = 0
    """Seed of the replicates."""

    def __post_init__(self) -> None:
        if self.draws < 2:
            raise UsageError("--draws must be at least 2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitCommand:
    """Fit runs by every method and say what to train with larger budgets."""

    runs: _Runs
    """JSON, JSON Lines or CSV with parameters, compute_budget or tokens, and final_loss."""
    budgets: tuple[float, ...] = (1e23, 1e24)
    """FLOPs to answer for."""
    level: float = 0.9
    """Probability with which intervals should hold the truth."""
    vocab_size: int = 32_000
    """Vocabulary of the model to build."""
    context: int = 2048
    """Tokens per sequence of the run to make."""
    batch_tokens: int | None = None
    """Tokens per step; what Step Law advises unless given."""
    plots: pathlib.Path | None = None
    """Directory for figures, PNG and SVG."""
    fit: FitOptions
    output: OutputOptions

    def __post_init__(self) -> None:
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise UsageError("--batch-tokens must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """Check a claimed N, D or fit against your runs."""

    runs: _Runs
    """JSON, JSON Lines or CSV with parameters, compute_budget or tokens, and final_loss."""
    budget: float
    """FLOPs that the claim is about."""
    parameters: float | None = None
    """The claimed N."""
    tokens: float | None = None
    """The claimed D; C/6N unless given."""
    coefficients: Annotated[
        tuple[str, str, str, str, str] | None, tyro.conf.arg(metavar="E A ALPHA B BETA")
    ] = None
    """The claimed coefficients, as printed: their digits count."""
    fit: FitOptions
    output: OutputOptions

    def __post_init__(self) -> None:
        if self.parameters is None and self.coefficients is None:
            raise UsageError("nothing to check: give --parameters or --coefficients")
        for flag, value in (
            ("--budget", self.budget),
            ("--parameters", self.parameters),
            ("--tokens", self.tokens),
        ):
            _require_positive(flag, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DesignCommand:
    """Choose the runs that tell most of a large model for their cost."""

    budget: float
    """What all runs together may cost: FLOPs, or the unit of the candidates' cost."""
    target: float
    """FLOPs whose best model is wanted."""
    runs: pathlib.Path | None = None
    """Runs that have been made already, as for fit."""
    sizes: tuple[float, ...] = ()
    """Parameters that a model may have; 17 sizes about the best one unless given."""
    run_flops: tuple[float, ...] = ()
    """FLOPs that a run may take; 1, 3 and 6 per decade up to the target unless given."""
    candidates: pathlib.Path | None = None
    """File of runs that could be made, instead of sizes and FLOPs; a cost column sets prices."""
    output: OutputOptions

    def __post_init__(self) -> None:
        for flag, values in (("--sizes", self.sizes), ("--run-flops", self.run_flops)):
            for value in values:
                _require_positive(flag, value)
            if values and self.candidates is not None:
                raise UsageError(f"{flag} and --candidates both say which runs could be made")


def _require_positive(flag: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UsageError(f"{flag} is {value:g}; it must be positive and finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingCommand:
    """Scaling laws: fit runs, check claims, design sweeps."""

    task: (
        Annotated[FitCommand, tyro.conf.subcommand("fit")]
        | Annotated[CheckCommand, tyro.conf.subcommand("check")]
        | Annotated[DesignCommand, tyro.conf.subcommand("design")]
    )


def run(command: ScalingCommand) -> int:
    """Fits, checks or designs."""
    task = command.task
    if isinstance(task, FitCommand):
        _fit(task)
    elif isinstance(task, CheckCommand):
        _check(task)
    else:
        _design(task)
    return 0


def _read_and_fit(runs: pathlib.Path, options: FitOptions) -> "ScalingFit":
    from paceline.scaling import fit, read_sweep

    sweep = read_sweep(runs)
    for remark in sweep.remarks:
        text = f"{runs}: row {remark.row}: {remark.name}: {remark.message}"
        # As it is: what a file says of itself is no markup.
        stderr_console().print(text, markup=False, soft_wrap=True)
    return fit(sweep, num_draws=options.draws, seed=options.seed)


def _fit(command: FitCommand) -> None:
    from paceline.scaling.allocation.decide import decide
    from paceline.scaling.checks.diagnose import diagnose
    from paceline.scaling.records import decision_records

    found = _read_and_fit(command.runs, command.fit)
    try:
        decisions = decide(
            found,
            command.budgets,
            level=command.level,
            vocab_size=command.vocab_size,
            context_length=command.context,
            batch_tokens=command.batch_tokens,
        )
    except UsageError:
        # Where runs do not decide, what is wrong with them is all the more wanted.
        if min(command.budgets, default=0) > 0:
            for finding in diagnose(found, command.budgets, command.level):
                stderr_console().print(f"{finding.name}: {finding.message}", markup=False)
        raise
    findings = diagnose(found, command.budgets, command.level)
    if command.output.json:
        for record in decision_records(decisions, findings):
            print_json(record)
    else:
        from paceline.reports.tables.scaling import methods_table, run_text, waste_table

        console = stdout_console()
        console.print(methods_table(found, decisions, command.level))
        for decision in decisions:
            console.print(waste_table(decision))
            console.print(run_text(decision), soft_wrap=True)
        _print_findings(findings)
    if command.plots is not None:
        _draw(found, command.plots)


def _draw(found: "ScalingFit", directory: pathlib.Path) -> None:
    from paceline.reports.plots.scaling import SCALING_PLOTS
    from paceline.reports.plots.style import save_figure

    for name, plot in SCALING_PLOTS.items():
        for path in save_figure(plot(found), directory, name):
            stderr_console().print(str(path), soft_wrap=True)


def _check(command: CheckCommand) -> None:
    from paceline.scaling.checks.claims import check_allocation, check_coefficients
    from paceline.scaling.records import claim_record
    from paceline.scaling.surface import tokens_for

    found = _read_and_fit(command.runs, command.fit)
    findings: list[Finding] = []
    cost = None
    tokens = command.tokens
    if command.parameters is not None:
        tokens = tokens or float(tokens_for(command.budget, command.parameters))
        cost, findings = check_allocation(found, command.budget, command.parameters, tokens)
    if command.coefficients is not None:
        findings += check_coefficients(found, command.coefficients, command.budget)
    if command.output.json:
        print_json(claim_record(command.budget, command.parameters, tokens, cost, findings))
        return
    if cost is not None:
        stdout_console().print(
            f"loss {cost.loss:.4f}, the best model's {cost.best_loss:.4f}; spends "
            f"{cost.spent:.2f} of the budget and wastes {cost.wasted:.1%} of that",
            soft_wrap=True,
        )
    _print_findings(findings)


def _print_findings(findings: "Sequence[Finding]") -> None:
    console = stdout_console()
    for finding in findings:
        text = f"{finding.name}: {finding.message}\n  → {finding.remedy}"
        console.print(text, soft_wrap=True, markup=False)
    if not findings:
        console.print("no findings")


def _design(command: DesignCommand) -> None:
    from paceline.reports.tables.scaling import runs_table
    from paceline.scaling.records import describe_design, design_record

    records, belief = _proposed(command)
    if command.output.json:
        for record in (*records, design_record(belief, command.target)):
            print_json(record)
        return
    console = stdout_console()
    console.print(runs_table(records))
    console.print(f"expected {describe_design(belief, command.target)}", soft_wrap=True)


def _proposed(command: DesignCommand) -> "tuple[list[Record], Belief]":
    """Returns the runs to make, and what will be known after them."""
    from paceline.scaling import candidate_runs, propose_runs, read_sweep
    from paceline.scaling.experiments.candidates import learn_from, read_candidates
    from paceline.scaling.experiments.design import after_buying
    from paceline.scaling.records import run_record

    known = None if command.runs is None else read_sweep(command.runs)
    if command.candidates is not None:
        candidates = read_candidates(command.candidates)
    else:
        candidates = candidate_runs(
            command.target, known, flops=command.run_flops, sizes=command.sizes
        )
    runs = propose_runs(known, candidates, budget=command.budget, target=command.target)
    belief = learn_from(known)
    for run in runs:
        belief = after_buying(belief, run.parameters, run.tokens)
    return [run_record(run) for run in runs], belief
