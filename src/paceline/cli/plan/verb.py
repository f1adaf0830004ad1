"""``paceline plan``: predictions by arithmetic, with their derivations."""

import dataclasses
import pathlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from paceline.benchmarks.options import ModelName, ShapeOverrides, StrategyChoice, listed
from paceline.cli.output import Flat, OutputOptions, print_json, require_figure
from paceline.cli.plan.goodput import GoodputCommand
from paceline.cli.plan.search import BudgetCommand, SearchCommand
from paceline.cli.plan.step import BacktestCommand, CalibrateRowsCommand, PlanStepCommand
from paceline.core.errors import UsageError
from paceline.core.hardware import find_device, known_devices
from paceline.core.presets import model_preset
from paceline.core.specs import BatchShape, precision_preset, require_context
from paceline.core.strategies import DEFAULT_BUCKET_SIZE_MB
from paceline.core.units import parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:
    from paceline.accounting.explanation import Explanation


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccountCommand:
    """Answer the courses' questions on communication accounting, in both conventions."""

    model: ModelName = "xxl"
    """Model preset with plain feed-forward blocks only."""
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Answers the four questions."""
        from paceline.course.accounting import account

        return _print(account(model_preset(self.model)), self.output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverheadCommand:
    """Predict what communication adds to the time of a step, and find the best bucket size."""

    size: str
    """Total size of the gradients, such as 135MB."""
    bandwidth: str
    """Algorithm bandwidth of an all-reduce: bytes over seconds, such as 1GB/s or 8Gbit/s."""
    latency: str
    """Latency of an all-reduce of a few bytes, such as 1ms or 20us."""
    backward_s: float | None = None
    """Seconds of the backward pass; by default, as long as the communication takes."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if not parse_seconds(self.latency, "latency") > 0:
            raise UsageError("--latency must be positive")
        if self.backward_s is not None and not self.backward_s > 0:
            raise UsageError("--backward-s must be positive")

    def run(self) -> int:
        """Evaluates the equation and prints its derivation."""
        from paceline.accounting.overlap import explain_overhead

        explanation = explain_overhead(
            total_bytes=parse_bytes(self.size),
            bytes_per_s=parse_rate(self.bandwidth) / 8,
            latency_s=parse_seconds(self.latency, "latency"),
            backward_s=self.backward_s,
        )
        return _print([explanation], self.output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCommand:
    """Predict the memory of a training step, and whether it fits on a device."""

    model: ModelName = "small"
    """Model preset."""
    strategy: StrategyChoice = "torch_ddp"
    """Data-parallel strategy, as in bench ddp."""
    world_size: int = 2
    """Number of ranks."""
    batch: int = 4
    """Sequences per rank."""
    context: int = 128
    """Tokens per sequence."""
    attention: Literal["sdpa", "naive"] = "sdpa"
    """sdpa is fused attention; naive stores all attention scores."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype to compute in; bfloat16 and float16 are autocast over float32 weights."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full recomputes each block's activations during backward."""
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB
    """Bucket size in MiB, for strategies that reduce-scatter buckets."""
    device: Annotated[str, listed(device.name for device in known_devices())] | None = None
    """Device whose memory the step must fit into."""
    figure: pathlib.Path | None = None
    """Also draw the memory of the step: a file that ends in .png or .svg."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError("--world-size must be at least 1")
        if not self.bucket_size_mb > 0:
            raise UsageError("--bucket-size-mb must be positive")
        require_figure(self.figure)

    def run(self) -> int:
        """Prints and explains the memory of a step, and draws it if requested."""
        from paceline.accounting.memory.step import StepPlan, explain_memory, fit_on_device
        from paceline.reports.tables.planning import instants_text

        model, shape = self.shape.apply(self.model)
        require_context(model, shape, self.context)
        plan = StepPlan(
            shape=shape,
            batch=BatchShape(num_sequences=self.batch, context_length=self.context),
            strategy=self.strategy,
            checkpointing=self.activation_checkpointing,
            attention=self.attention,
            precision=precision_preset(self.precision),
            bucket_size_mb=self.bucket_size_mb,
        )
        device = None if self.device is None else find_device(self.device)
        instants = plan.instants(self.world_size)
        if self.figure is not None:
            from paceline.reports.plots.memory import plot_memory_plan
            from paceline.reports.plots.style import save_as

            title = f"{model} under {self.strategy}, fullest of {self.world_size} ranks"
            save_as(plot_memory_plan(instants, title=title, device=device), self.figure)
        if not self.output.json:
            if device is not None:
                verdict = str(fit_on_device(plan, self.world_size, device))
                sys.stdout.write(verdict.replace("does_not_fit", "does not fit") + "\n\n")
            sys.stdout.write(instants_text(instants) + "\n\n")
        return _print([explain_memory(plan, self.world_size, device=device)], self.output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Predict time, memory, layouts and cost of training by arithmetic, before you run anything."""

    question: (
        Annotated[AccountCommand, tyro.conf.subcommand("account")]
        | Annotated[OverheadCommand, tyro.conf.subcommand("overhead")]
        | Annotated[MemoryCommand, tyro.conf.subcommand("memory")]
        | Annotated[PlanStepCommand, tyro.conf.subcommand("step")]
        | Annotated[BacktestCommand, tyro.conf.subcommand("backtest")]
        | Annotated[GoodputCommand, tyro.conf.subcommand("goodput")]
        | Annotated[SearchCommand, tyro.conf.subcommand("search")]
        | Annotated[BudgetCommand, tyro.conf.subcommand("budget")]
        | Annotated[CalibrateRowsCommand, tyro.conf.subcommand("calibrate")]
    )

    def run(self) -> int:
        """Runs the chosen subcommand."""
        return self.question.run()


def _print(explanations: "Iterable[Explanation]", output: OutputOptions) -> int:
    """Prints derivations, or one JSON object per question with --json."""
    if output.json:
        for explanation in explanations:
            print_json(explanation)
    else:
        sys.stdout.write("\n\n".join(explanation.render() for explanation in explanations) + "\n")
    return 0
