"""``paceline plan budget``: finds how many devices spend a FLOP budget by a deadline."""

import dataclasses
from typing import TYPE_CHECKING

from paceline.benchmarks.harness.config import ModelName
from paceline.cli.output import Flat, OutputOptions, print_json, stdout_console
from paceline.cli.plan.quantities import parse_count, parse_days
from paceline.cli.plan.search_options import UNNAMED_CONTEXT, ClusterOptions
from paceline.core.presets import model_preset
from paceline.core.specs import ModelShape

if TYPE_CHECKING:
    from paceline.planner.search.budget import Budget


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
    model: ModelName | None = None
    """Model preset; by default, the size that spends the budget at 20 tokens per parameter."""
    cluster: Flat[ClusterOptions] = dataclasses.field(default_factory=ClusterOptions)
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Searches all numbers of devices and prints a table."""
        from paceline.planner.search.budget import plan_budget

        flops = parse_count(self.flops, "flops", "1e24")
        days = parse_days(self.deadline)
        shape = self._shape(flops)
        costs = self.cluster.costs()
        found = plan_budget(
            self.cluster.question(shape, self.cluster.devices_per_host),
            costs,
            flops=flops,
            deadline_days=days,
            peak_flops=self.cluster.peak_flops(),
            price=self.cluster.price,
            device_interval_h=self.cluster.failure_interval_h,
        )
        if self.output.json:
            self._print_json(found)
        else:
            from paceline.reports.tables.planning.budget import budget_table

            stdout_console().print(
                budget_table(found, self._model_text(shape), self.cluster.device, (costs.note,))
            )
        return 0

    def _shape(self, flops: float) -> ModelShape:
        if self.model is not None:
            return model_preset(self.model)
        from paceline.scaling.allocation.model_shapes import cluster_shape, rule_of_thumb_parameters

        context = self.cluster.context or UNNAMED_CONTEXT
        return cluster_shape(rule_of_thumb_parameters(flops), context)

    def _model_text(self, shape: ModelShape) -> str:
        from paceline.accounting.parameters import count_parameters

        billions = count_parameters(shape).total / 1e9
        dimensions = f"{shape.num_layers} layers, width {shape.d_model:,}"
        name = self.model or "20 tokens per parameter"
        return f"{name} ({billions:.3g} billion parameters: {dimensions})"

    def _print_json(self, found: "Budget") -> None:
        for point in found.points:
            is_smallest, is_cheapest = point is found.smallest, point is found.cheapest
            row = {"kind": "budget", "smallest": is_smallest, "cheapest": is_cheapest}
            print_json(row | {"layout": point.choice.name, "point": point})
