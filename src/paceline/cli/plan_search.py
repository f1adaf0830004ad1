"""``paceline plan search``: searches all layouts for the fastest one.

``paceline plan budget``: finds how many devices spend a FLOP budget by a deadline.
"""

import dataclasses
import pathlib
from typing import TYPE_CHECKING

import tyro

from paceline.benchmarks.options import DeviceChoice, PlannedModel
from paceline.cli.output import FigurePath, Flat, OutputOptions, given_flags, say, work_progress
from paceline.core.errors import UsageError
from paceline.core.runnable import Work, unsupported_reasons
from paceline.core.units import format_suffixed
from paceline.planner.search.cluster_options import (
    UNNAMED_CONTEXT,
    ClusterOptions,
    parse_count,
    parse_days,
)

if TYPE_CHECKING:
    from paceline.accounting.model_config import NamedModel
    from paceline.planner.search.budget import RunEstimate
    from paceline.planner.search.search import SearchResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterFlags(ClusterOptions):
    """Flags of the cluster and the batch."""

    device: DeviceChoice = "h100-sxm"
    """Kind of device, from the hardware table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchCommand:
    """Find the fastest parallel layout of a model, what bounds its step, and what would help.

    Evaluates every layout that divides the model, the batch and the devices, and shows the best
    one of each mesh of tensor, context, pipeline and expert ranks.
    """

    model: PlannedModel = "llama3-8B"
    """Model: a preset, a Hugging Face directory or config.json, a TOML file with [model], or
    dimensions; mixtures of experts also have an expert-parallel axis."""
    devices: int = 64
    """Number of devices of the cluster."""
    cluster: Flat[ClusterFlags] = dataclasses.field(default_factory=ClusterFlags)
    tokens: str | None = None
    """Training tokens of the run, such as 1e12 or 15T: adds days with goodput, and device-hours."""
    top: int = 8
    """Number of layouts to show."""
    compare: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Explain why another layout is not the best: its fields, such as tp=8,pp=2 (also dp,
    replicate, shard, sp, cp, ep, vp, zero, micro, recompute)."""
    explain: bool = False
    """Print every term of the fastest layout's time and memory with its formula and numbers."""
    runnable: bool = False
    """Search only layouts that paceline train can run."""
    advice: bool = True
    """List what would help, from searches with one thing changed; --no-advice leaves it out."""
    figure: FigurePath | None = None
    """Also draw days over device-hours for several numbers of devices: a .png or .svg file."""
    out: pathlib.Path | None = None
    """Directory for plan.json, torchtitan.toml, megatron.args, commands.sh of the best layout."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.devices < 1 or self.top < 1:
            raise UsageError("--devices and --top must be at least 1")
        if self.tokens is None:
            for flag in given_flags(self.cluster, ("price", "device_interval_h")):
                raise UsageError(f"{flag} needs the --tokens of the run; add them")

    def run(self) -> int:
        """Searches and prints the best layouts."""
        from paceline.accounting.named_model import find_model
        from paceline.planner.search.advice import compare, sensitivity, variations
        from paceline.planner.search.search import search
        from paceline.reports.tables import planning

        model = find_model(self.model)
        mixture = model.experts is not None
        spec = self.cluster.spec(
            model.shape, self.devices, experts=model.experts, runnable=self.runnable
        )
        performance, peak = self.cluster.performance(of_experts=mixture), self.cluster.peak_flops()
        tokens = None if self.tokens is None else parse_count(self.tokens, "tokens", "1e12 or 15T")
        with work_progress("searching all layouts"):
            result = search(spec, performance, top=self.top, peak_flops=peak)
        runs = None if tokens is None else self._estimate_runs(result, tokens)
        compared = [compare(each, result.best, spec, performance, peak) for each in self.compare]
        notes = [*([] if runs is None else planning.run_lines(runs[0])), performance.note]
        notes += model.remarks
        if self.runnable:
            notes.append("These rates are not those of paceline train: measure, or use plan step.")
        rows = self._rows(result, model, runs)
        tables: list[object] = [planning.search_table(result, _sized(model), runs, notes)]
        for pair in compared:
            rows.append({"kind": "comparison", "reason": pair.reason, "pair": pair})
            tables.append(planning.comparison_table(pair))
        if self.explain:
            from paceline.planner.search.explanation import explain_choice

            explained = explain_choice(result.best, spec, performance)
            rows.append({"kind": "explanation", "explanation": explained})
            tables.append(explained.render())
        if self.advice:
            lower = self.cluster.lower_precision(of_experts=mixture)
            offered = list(variations(result.best, spec, performance, lower))
            with work_progress("searching what would help", len(offered)) as done:
                changes = sensitivity(result.best, spec, offered, done)
            rows += [{"kind": "change", "change": change} for change in changes]
            tables += [planning.advice_table(changes)] if changes else []
        self.output.show(rows, *tables)
        if self.figure is not None:
            self._draw(result, tokens)
        if self.out is not None:
            self._export(result)
        return 0

    def _estimate_runs(self, result: "SearchResult", tokens: float) -> "list[RunEstimate]":
        from paceline.planner.search.budget import estimate_run

        return [
            estimate_run(
                choice,
                result.spec.shape,
                tokens=tokens,
                held_devices=self.devices,
                price=self.cluster.price,
                device_interval_h=self.cluster.failure_interval_h,
                experts=result.spec.experts,
            )
            for choice in result.choices
        ]

    def _rows(
        self, result: "SearchResult", model: "NamedModel", runs: "list[RunEstimate] | None"
    ) -> list[dict[str, object]]:
        """Returns the search, and each of its layouts."""
        from paceline.accounting.counts import all_parameters
        from paceline.planner.search.advice import not_told_apart

        search: dict[str, object] = {
            "kind": "search",
            "model": self.model,
            "parameters": all_parameters(model.shape, model.experts),
            "global_batch": result.spec.global_batch,
            "context_length": result.spec.context_length,
            "devices": self.devices,
            "device": self.cluster.device,
            "precision": self.cluster.precision,
            "calibration": result.performance.name,
            "framework": result.performance.framework,
            "measured_runs": result.performance.num_rows,
            "candidates": result.num_candidates,
            "fitting": result.num_fitting,
            "elapsed_s": result.elapsed_s,
            "not_told_apart": not_told_apart(result.choices),
        }
        rows = [search]
        for place, choice in enumerate(result.choices):
            run = None if runs is None else runs[place]
            row = {"kind": "layout", "rank": place + 1, "name": choice.name, "bound": choice.bound}
            row |= {"bubble": choice.bubble_share, "exposed": choice.exposed_share}
            rows.append(row | {"choice": choice, "run": run})
        return rows

    def _draw(self, result: "SearchResult", tokens: float | None) -> None:
        from paceline.planner.search.advice import pareto_front
        from paceline.reports.plots.planning import front_marks, plot_front
        from paceline.reports.plots.style import save_as

        with work_progress("searching fewer and more devices"):
            points = pareto_front(result.spec, result.performance)
        shown = 1e12 if tokens is None else tokens
        subtitle = (
            f"{self.model}, {format_suffixed(shown)} tokens, batch of "
            f"{result.spec.tokens_per_step:,}, {self.cluster.device}: the best layout of each "
            "number of devices"
        )
        assert self.figure is not None
        save_as(plot_front(front_marks(points, shown), subtitle), self.figure)

    def _export(self, result: "SearchResult") -> None:
        from paceline.planner.search.exports import write_exports

        assert self.out is not None
        best, spec = result.best, result.spec
        work = Work(
            shape=spec.shape,
            context_length=spec.context_length,
            num_micro_batches=best.batch.accumulation_steps,
        )
        runs = spec.experts is None and not unsupported_reasons(best.layout, work)
        paths = write_exports(
            self.out,
            best,
            spec,
            self.cluster.device,
            is_runnable=runs,
            framework=result.performance.framework,
        )
        say(f"wrote {', '.join(map(str, paths))}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetCommand:
    """Find the smallest and the cheapest cluster that spends a budget of FLOPs by a deadline.

    Searches the best layout for every number of devices. Times include failures, restarts and
    checkpoints.
    """

    flops: str
    """Model FLOPs of the run, such as 1e24."""
    deadline: str = "30d"
    """Maximum duration of the run, such as 30d, 12h or 2w."""
    model: PlannedModel | None = None
    """Model, as in plan search; by default, the size that spends the budget at 20 tokens per
    parameter (of all parameters, embeddings included)."""
    cluster: Flat[ClusterFlags] = dataclasses.field(default_factory=ClusterFlags)
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Searches all numbers of devices and prints a table."""
        from paceline.planner.search.budget import plan_budget
        from paceline.reports.tables.planning import budget_table

        flops = parse_count(self.flops, "flops", "1e24")
        days = parse_days(self.deadline)
        model = self._model(flops)
        performance = self.cluster.performance(of_experts=model.experts is not None)
        found = plan_budget(
            self.cluster.spec(model.shape, self.cluster.devices_per_host, experts=model.experts),
            performance,
            flops=flops,
            deadline_days=days,
            peak_flops=self.cluster.peak_flops(),
            price=self.cluster.price,
            device_interval_h=self.cluster.failure_interval_h,
        )
        notes = (performance.note, *model.remarks)
        if self.model is None:
            notes = (_rule_note(model, found.tokens), *notes)
        table = budget_table(found, _model_text(model), self.cluster.device, notes)
        rows = [
            {
                "kind": "budget",
                "smallest": point is found.smallest,
                "cheapest": point is found.cheapest,
                "layout": point.choice.name,
                "point": point,
            }
            for point in found.points
        ]
        self.output.show(rows, table)
        return 0

    def _model(self, flops: float) -> "NamedModel":
        from paceline.accounting.model_config import NamedModel
        from paceline.accounting.named_model import find_model

        if self.model is not None:
            return find_model(self.model)
        from paceline.scaling.model_shapes import cluster_shape, rule_of_thumb_parameters

        context = self.cluster.context or UNNAMED_CONTEXT
        shape = cluster_shape(rule_of_thumb_parameters(flops), context)
        return NamedModel("20 tokens per parameter", shape)


def _rule_note(model: "NamedModel", tokens: float) -> str:
    """Says what the rule of thumb counts, and what the exact FLOPs of its model make of it."""
    from paceline.accounting.counts import all_parameters

    ratio = tokens / all_parameters(model.shape, model.experts)
    return (
        "20 tokens per parameter: of all parameters, embeddings included, at 6 FLOPs per parameter "
        f"and token; at the FLOPs of this model, attention included, they are {ratio:.3g}."
    )


def _model_text(model: "NamedModel") -> str:
    shape = model.shape
    dimensions = f"{shape.num_layers} layers, width {shape.d_model:,}"
    return _sized(model).removesuffix(")") + f": {dimensions})"


def _sized(model: "NamedModel") -> str:
    """Returns a model's name with its number of parameters."""
    from paceline.accounting.counts import all_parameters

    number = all_parameters(model.shape, model.experts)
    size = f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
    return f"{model.name} ({size} parameters)"
