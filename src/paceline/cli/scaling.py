"""``paceline scaling``: extrapolates from the losses of small runs to the size of a large one."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated

import tyro

from paceline.cli.output import OutputOptions, require_positive, say, work_progress
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.finding import Finding
    from paceline.scaling import ScalingFit

_Runs = Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUNS")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How runs are fitted."""

    sweep: str | None = None
    """Name of the sweep, if the JSON file has several."""
    draws: int = 1000
    """Bootstrap replicates for the intervals."""
    seed: int = 0
    """Random seed of the bootstrap."""

    def __post_init__(self) -> None:
        if self.draws < 2:
            raise UsageError("--draws must be at least 2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitCommand:
    """Fit scaling laws to runs by every method, and say what to train with larger budgets."""

    runs: _Runs
    """JSON, JSON Lines or CSV with parameters, compute_budget or tokens, and final_loss."""
    budgets: tuple[float, ...] = (1e23, 1e24)
    """Budgets in FLOPs to choose a model for."""
    vocab_size: int = 32_000
    """Vocabulary size of the model to train."""
    context: int = 2048
    """Context length of the model to train, in tokens."""
    batch_tokens: int | None = None
    """Tokens per step; by default, what Step Law advises."""
    plots: pathlib.Path | None = None
    """Directory for plots, as PNG and SVG."""
    fit: FitOptions
    output: OutputOptions

    def __post_init__(self) -> None:
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise UsageError("--batch-tokens must be at least 1")

    def run(self) -> int:
        """Prints decisions and findings, and draws plots if requested."""
        from paceline.reports.tables.scaling import methods_table, run_text, waste_table
        from paceline.scaling.decide import decide
        from paceline.scaling.diagnose import diagnose
        from paceline.scaling.records import decision_records

        found = _read_and_fit(self.runs, self.fit)
        try:
            decisions = decide(
                found,
                self.budgets,
                vocab_size=self.vocab_size,
                context_length=self.context,
                batch_tokens=self.batch_tokens,
            )
        except UsageError:
            # If the runs do not allow a decision, the findings explain why.
            if min(self.budgets, default=0) > 0:
                for finding in diagnose(found, self.budgets):
                    say(str(finding))
            raise
        findings = diagnose(found, self.budgets)
        shown: list[object] = [methods_table(found, decisions)]
        for decision in decisions:
            shown += (waste_table(decision), run_text(decision))
        self.output.show(decision_records(decisions, findings), *shown, *_lines(findings))
        if self.plots is not None:
            from paceline.reports.plots.scaling_laws import SCALING_PLOTS
            from paceline.reports.plots.style import save_figure

            for name, plot in SCALING_PLOTS.items():
                for path in save_figure(plot(found), self.plots, name):
                    say(str(path))
        return 0


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
    """The claimed D; by default C/6N."""
    coefficients: Annotated[
        tuple[str, str, str, str, str] | None, tyro.conf.arg(metavar="E A ALPHA B BETA")
    ] = None
    """The claimed coefficients as published: the number of digits matters."""
    fit: FitOptions
    output: OutputOptions

    def __post_init__(self) -> None:
        if self.parameters is None and self.coefficients is None:
            raise UsageError("nothing to check: give --parameters or --coefficients")
        require_positive(
            {"--budget": self.budget, "--parameters": self.parameters, "--tokens": self.tokens}
        )

    def run(self) -> int:
        """Prints the cost of the claim, and findings against it."""
        from paceline.scaling.claims import check_allocation, check_coefficients
        from paceline.scaling.records import claim_record
        from paceline.scaling.surface import tokens_for

        found = _read_and_fit(self.runs, self.fit)
        findings: list[Finding] = []
        cost = None
        tokens = self.tokens
        if self.parameters is not None:
            tokens = tokens or float(tokens_for(self.budget, self.parameters))
            cost, findings = check_allocation(found, self.budget, self.parameters, tokens)
        if self.coefficients is not None:
            findings += check_coefficients(found, self.coefficients, self.budget)
        lines = _lines(findings)
        if cost is not None:
            lines.insert(
                0,
                f"loss {cost.loss:.4f}, best model {cost.best_loss:.4f}; spends "
                f"{cost.spent:.2f} of the budget and wastes {cost.wasted:.1%} of that",
            )
        record = claim_record(self.budget, self.parameters, tokens, cost, findings)
        self.output.show([record], *lines)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DesignCommand:
    """Choose the small runs that tell most about a large model for their cost."""

    budget: float
    """Cost of all runs together: in FLOPs, or in the unit of the candidates' cost."""
    target: float
    """FLOPs of the large run whose best model you want to find."""
    runs: pathlib.Path | None = None
    """File of runs that you already have, as for fit."""
    sizes: tuple[float, ...] = ()
    """Candidate model sizes in parameters; by default, 17 sizes around the best one."""
    run_flops: tuple[float, ...] = ()
    """Candidate FLOPs of a run; by default 1, 3 and 6 per decade up to the target."""
    candidates: pathlib.Path | None = None
    """File of candidate runs, instead of sizes and FLOPs; a cost column sets prices."""
    output: OutputOptions

    def __post_init__(self) -> None:
        for flag, values in (("--sizes", self.sizes), ("--run-flops", self.run_flops)):
            for value in values:
                require_positive({flag: value})
            if values and self.candidates is not None:
                raise UsageError(f"{flag} and --candidates both list candidate runs; give one")

    def run(self) -> int:
        """Prints the proposed runs, and the expected accuracy after them."""
        from paceline.reports.tables.scaling import runs_table
        from paceline.scaling import candidate_runs, propose_runs, read_sweep
        from paceline.scaling.design import after_buying, learn_from, read_candidates
        from paceline.scaling.records import describe_design, design_record, run_record

        known = None if self.runs is None else read_sweep(self.runs)
        if self.candidates is not None:
            candidates = read_candidates(self.candidates)
        else:
            candidates = candidate_runs(self.target, known, flops=self.run_flops, sizes=self.sizes)
        runs = propose_runs(known, candidates, budget=self.budget, target=self.target)
        posterior = learn_from(known)
        for run in runs:
            posterior = after_buying(posterior, run.parameters, run.tokens)
        records = [run_record(run) for run in runs]
        rows = [*records, design_record(posterior, self.target)]
        text = f"expected {describe_design(posterior, self.target)}"
        self.output.show(rows, runs_table(records), text)
        return 0


def _read_and_fit(runs: pathlib.Path, options: FitOptions) -> "ScalingFit":
    from paceline.scaling import fit, read_sweep

    sweep = read_sweep(runs, name=options.sweep)
    for remark in sweep.remarks:
        say(f"{runs}: row {remark.row}: {remark.name}: {remark.message}")
    with work_progress("fitting by every method"):
        return fit(sweep, num_draws=options.draws, seed=options.seed)


def _lines(findings: "Sequence[Finding]") -> list[str]:
    return [str(finding) for finding in findings] or ["no findings"]
