"""``paceline plan account``, ``overhead``, ``memory``, ``goodput``: answers by arithmetic."""

import dataclasses
import pathlib
from typing import Literal

from paceline.benchmarks.options import (
    DeviceChoice,
    ModelName,
    PlannedModel,
    ShapeOverrides,
    StrategyChoice,
)
from paceline.cli.output import FigurePath, Flat, OutputOptions, case_progress, given_flags, say
from paceline.core.errors import UsageError
from paceline.core.hardware import find_device
from paceline.core.presets import model_preset
from paceline.core.specs import BatchShape, precision_preset, require_context
from paceline.core.strategies import DEFAULT_BUCKET_SIZE_MB
from paceline.core.units import parse_bytes, parse_rate, parse_seconds
from paceline.planner.search.cluster_options import require_some_context


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccountCommand:
    """Answer the courses' questions on communication accounting, in both conventions."""

    model: ModelName = "xxl"
    """Model preset with plain feed-forward blocks only."""
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Answers the four questions."""
        from paceline.course.accounting import account

        working = account(model_preset(self.model))
        self.output.show(working, "\n\n".join(each.render() for each in working))
        return 0


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
        if not parse_bytes(self.size) > 0:
            raise UsageError("--size must be positive")
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
        self.output.show([explanation], explanation.render())
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCommand:
    """Predict the memory of a training step, and whether it fits on a device."""

    model: PlannedModel = "small"
    """Model: a preset, a Hugging Face directory or config.json, a TOML file with [model], or
    dimensions."""
    strategy: StrategyChoice = "torch_ddp"
    """Data-parallel strategy, as in bench ddp."""
    world_size: int = 2
    """Number of ranks."""
    batch: int = 4
    """Sequences per rank."""
    context: int | None = None
    """Tokens per sequence; by default, the longest that the model accepts."""
    attention: Literal["sdpa", "naive"] = "sdpa"
    """sdpa is fused attention; naive stores all attention scores."""
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """dtype to compute in; bfloat16 and float16 are autocast over float32 weights."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full recomputes each block's activations during backward."""
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB
    """Bucket size in MiB, for strategies that reduce-scatter buckets."""
    device: DeviceChoice | None = None
    """Device whose memory the step must fit into; without one, the memory is that on a CPU."""
    figure: FigurePath | None = None
    """Also draw the memory of the step: a file that ends in .png or .svg."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError("--world-size must be at least 1")
        require_some_context(self.context)
        if not self.bucket_size_mb > 0:
            raise UsageError("--bucket-size-mb must be positive")

    def run(self) -> int:
        """Prints and explains the memory of a step, and draws it if requested."""
        from paceline.accounting.explanation import folded
        from paceline.accounting.memory.step import explain_memory, fit_on_device
        from paceline.accounting.named_model import find_model
        from paceline.predict.strategy_memory import step_plan
        from paceline.reports.tables.planning import instants_text

        model = find_model(self.model)
        name, shape = self.shape.change(model.name, model.shape)
        model = model._replace(name=name, shape=shape)
        context = self.context or model.shape.max_context_length
        require_context(model.name, model.shape, context)
        plan = step_plan(
            model,
            batch=BatchShape(num_sequences=self.batch, context_length=context),
            strategy=self.strategy,
            checkpointing=self.activation_checkpointing,
            attention=self.attention,
            precision=precision_preset(self.precision),
            bucket_size_mb=self.bucket_size_mb,
            on_accelerator=self.device is not None,
        )
        device = None if self.device is None else find_device(self.device)
        instants = plan.instants(self.world_size)
        if self.figure is not None:
            from paceline.reports.plots.memory import plot_memory_plan
            from paceline.reports.plots.style import save_as

            title = f"{model.name} under {self.strategy}, fullest of {self.world_size} ranks"
            save_as(plot_memory_plan(instants, title=title, device=device), self.figure)
        explanation = explain_memory(plan, self.world_size, device=device)
        texts = [instants_text(instants), explanation.render()]
        texts += [folded("", remark) for remark in model.remarks]
        if device is not None:
            verdict = str(fit_on_device(plan, self.world_size, device))
            texts.insert(0, folded("", verdict.replace("does_not_fit", "does not fit")))
        self.output.show([explanation], "\n\n".join(texts))
        return 0


_FAILURES_PER_S = 15_000
"""Failures that are simulated in a second on one core, about."""
_MANY_FAILURES = 30 * _FAILURES_PER_S
"""Failures from which on it is said how long the simulations take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoodputCommand:
    """Simulate failures in long runs: restarts or replicas, spare hosts, kinds of checkpoints.

    Devices fail as often as in the training of Llama 3. Times are those of large
    clusters or those measured on a small machine; flags override them.
    """

    devices: tuple[int, ...] = (1_024, 16_384, 100_000)
    """Numbers of devices to simulate."""
    constants: Literal["cluster", "measured"] = "cluster"
    """Where times come from: reports of large runs, or Paceline measured on a small machine."""
    detection: str | None = None
    """Time from a failure until the job is stopped, such as 30s."""
    restart: str | None = None
    """Time to start all ranks, such as 5min; the rendezvous comes on top."""
    disk_bandwidth: str | None = None
    """Disk bandwidth of one device when all devices write, such as 122MB/s."""
    replay: bool = False
    """Replay Llama 3's published interruptions instead; unpublished constants are varied."""
    trials: int = 8
    """Simulated runs per case."""
    seed: int = 0
    """Random seed of the simulations."""
    figure: FigurePath | None = None
    """Also draw goodput against devices: a file that ends in .png or .svg."""
    store: pathlib.Path | None = None
    """JSON Lines file to append the records to."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if not self.devices or min(self.devices) < 1:
            raise UsageError("--devices must be at least 1")
        if self.trials < 1:
            raise UsageError("--trials must be positive")
        if self.replay:
            self._require_of_replay()

    def _require_of_replay(self) -> None:
        """Raises for an option that the replay of a published run does not take."""
        if self.figure is not None:
            raise UsageError(
                "--figure plots goodput over devices, which --replay does not vary; leave one out"
            )
        of_simulations = ("devices", "constants", "detection", "restart", "disk_bandwidth")
        for flag in given_flags(self, of_simulations):
            raise UsageError(
                f"--replay is of Llama 3's run with its own devices and times, and takes no "
                f"{flag}; leave one out"
            )

    def run(self) -> int:
        """Simulates runs and prints tables with the assumptions."""
        return self._replay() if self.replay else self._simulate()

    def _simulate(self) -> int:
        from paceline.planner.goodput.options import ASSUMPTIONS, CONSTANTS, options
        from paceline.planner.goodput.simulate import expected_failures, option_records
        from paceline.records import capture_environment
        from paceline.reports.tables.reliability import gains_table, goodput_table

        changes = self._changes()
        constants = dataclasses.replace(CONSTANTS[self.constants], **changes)
        chosen = list(options(self.devices, constants))
        failures = expected_failures(chosen, self.trials)
        if failures > _MANY_FAILURES:
            say(
                f"simulating about {float(f'{failures:.2g}'):,.0f} failures, about "
                f"{_FAILURES_PER_S:,} in a second; fewer --trials or --devices take less time"
            )
        with case_progress(len(chosen)) as progress:
            made = option_records(
                chosen,
                capture_environment(),
                constants=f"{self.constants}, changed" if changes else self.constants,
                trials=self.trials,
                seed=self.seed,
                done=progress.next_case,
                progress=progress.step,
            )
            records = list(self.output.keep(made, self.store))
        changed = f"; changed: {', '.join(changes)}" if changes else ""
        notes = (f"constants: {self.constants}{changed}", *ASSUMPTIONS)
        by_devices = (
            [each for each in records if each.case["devices"] == devices]
            for devices in self.devices
        )
        gains = gains_table(records, tuple(f"- {note}" for note in notes))
        self.output.show((), *map(goodput_table, by_devices), gains)
        if self.figure is not None:
            from paceline.reports.plots.reliability import plot_goodput
            from paceline.reports.plots.style import save_as

            save_as(plot_goodput(records), self.figure)
        return 0

    def _replay(self) -> int:
        from paceline.planner.goodput.options import LLAMA3_EFFECTIVE
        from paceline.planner.goodput.simulate import replay_records
        from paceline.records import capture_environment
        from paceline.reports.tables.reliability import replay_table

        made = replay_records(capture_environment(), trials=self.trials, seed=self.seed)
        records = list(self.output.keep(made, self.store))
        self.output.show((), replay_table(records, LLAMA3_EFFECTIVE))
        return 0

    def _changes(self) -> dict[str, float]:
        """Returns the constants that flags override."""
        changes = {}
        if self.detection is not None:
            changes["detection_s"] = parse_seconds(self.detection, "detection")
        if self.restart is not None:
            changes["restart_s"] = parse_seconds(self.restart, "restart")
        if self.disk_bandwidth is not None:
            changes["disk_bytes_per_s"] = parse_rate(self.disk_bandwidth) / 8
        return changes
