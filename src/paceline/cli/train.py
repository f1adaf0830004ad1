"""``paceline train``: trains a model from a config."""

import dataclasses
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from paceline.benchmarks.options import ModelName
from paceline.cli.output import Flat, OutputOptions, guarded, say
from paceline.core.errors import UsageError
from paceline.core.processes import die_with_agent, termination_as_exit

if TYPE_CHECKING:
    from paceline.accounting.memory.step import MemoryParts
    from paceline.core.plan import Estimate
    from paceline.core.strategies import Compression
    from paceline.training.config import RunConfig
    from paceline.training.forecast import Forecast
    from paceline.training.loop import RunOutcome

_TEMPLATE = "init"
_FORECAST_KEYS = (
    "num_parameters",
    "num_steps",
    "flops",
    "tokens",
    "memory",
    "kept_in_memory_bytes",
    "step_time_s",
    "corrected",
    "final_loss",
)
"""What --dry-run --json prints of the forecast."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a model from a config; paceline train init > run.toml writes one to start from."""

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML|init")]
    """Config of the run. An interrupted run resumes from its newest checkpoint."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Override a key of the config, such as training.steps=100."""
    plan: pathlib.Path | None = None
    """Predictions of paceline plan step --json, of which the fastest sets model, batch, strategy
    and ranks, or plan.json of plan search --out. --set overrides the plan."""
    ranks: int | None = None
    """Ranks to start on this host, unless a launcher (torchrun, Slurm) has started them. By default
    one per GPU, or one rank without a GPU."""
    supervise: bool = False
    """Restart ranks that die or hang, from the newest checkpoint. For ranks on one host."""
    max_restarts: int = 100
    """Maximum restarts with --supervise, which gives up earlier if one step fails three times."""
    dry_run: bool = False
    """Print the resolved config and the predicted compute, memory and time, and stop."""
    calibration: pathlib.Path | None = None
    """Records of paceline calibrate, used to predict the step time."""
    runs: pathlib.Path | None = None
    """Finished runs of smaller models, in the format of paceline scaling fit, used to predict the
    final loss."""
    model: ModelName = "bytes-6M"
    """With init: model preset to write a config for."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise UsageError("--ranks must be at least 1")

    def run(self) -> int:
        """Trains, or prints a template or a forecast."""
        if self.config == _TEMPLATE:
            return self._print_template()
        from paceline.training.toml_config import read_config

        settings, ranks = None, self.ranks
        if self.plan is not None:
            from paceline.training.plan import read_plan

            plan = read_plan(self.plan)
            if ranks not in (None, plan.world_size):
                raise UsageError(
                    f"--ranks {ranks}: {self.plan} is a plan for {plan.world_size} ranks"
                )
            settings, ranks = plan.settings, plan.world_size
        config = read_config(pathlib.Path(self.config), self.set, settings)
        verb = dataclasses.replace(self, ranks=ranks)
        return verb._print_forecast(config) if self.dry_run else verb._train(config)

    def _print_template(self) -> int:
        from paceline.data.loader.config import SourceConfig
        from paceline.training.config import DataConfig, ModelConfig, RunConfig
        from paceline.training.toml_config import config_template

        config = RunConfig(
            out="run",
            model=ModelConfig(preset=self.model),
            data=DataConfig(sources=(SourceConfig(place="tokens"),)),
        )
        sys.stdout.write(config_template(config))
        return 0

    def _print_forecast(self, config: "RunConfig") -> int:
        from paceline.training.forecast import resolve
        from paceline.training.toml_config import encode_config

        num_ranks = self.ranks or config.parallel.default_ranks
        predicted = resolve(config, num_ranks, self.calibration).forecast
        text = (
            "parameters, compute, memory and time: not predicted for this Hugging Face model; they "
            "are for dense models of known types (paceline plan memory --model DIRECTORY)"
        )
        details = None
        if (memory := predicted.memory) is not None:
            predicted = msgspec.structs.replace(predicted, final_loss=self._final_loss(config))
            text = _forecast_text(predicted, memory, config.parallel.compression)
            details = {name: getattr(predicted, name) for name in _FORECAST_KEYS}
        row = {"config": config, "forecast": details}
        self.output.show([row], f"{encode_config(config)}\n{text}")
        return 0

    def _train(self, config: "RunConfig") -> int:
        die_with_agent(os.environ)  # Before torch is imported, which takes seconds.
        with termination_as_exit():
            from paceline.training.launch import LaunchOptions, launch

            asks_for_prediction = self.calibration is not None or self.runs is not None
            options = LaunchOptions(
                num_ranks=self.ranks,
                supervised=self.supervise,
                max_restarts=self.max_restarts,
                calibration=self.calibration,
                predict_final_loss=self._final_loss,
                remembers=asks_for_prediction and config.model.hugging_face is None,
                report=lambda outcome: self._report(config, outcome),
                guard=guarded,
            )
            return launch(config, options)

    def _report(self, config: "RunConfig", outcome: "RunOutcome") -> None:
        text = f"{outcome.reason} after step {outcome.step:,}, loss {outcome.loss:.4f}"
        self.output.show([outcome], f"{text}; {config.out}")

    def _final_loss(self, config: "RunConfig") -> "Estimate | None":
        """Predicts the final loss from smaller runs, if given."""
        if self.runs is None:
            return None
        from paceline.accounting.counts import count_parameters
        from paceline.scaling import fit, read_sweep
        from paceline.scaling.fits.prediction import predict_loss
        from paceline.scaling.surface import compute_for

        num_parameters = count_parameters(config.model.shape).total
        num_tokens = config.tokens_per_step * config.training.steps
        sweep = read_sweep(self.runs)
        beyond = float(compute_for(num_parameters, num_tokens)) / max(sweep.compute)
        if beyond > 1:
            say(
                f"{self.runs}: this run has {beyond:.3g} times the compute of the largest one there"
            )
        return predict_loss(fit(sweep).parametric, num_parameters, num_tokens)


def _forecast_text(predicted: "Forecast", memory: "MemoryParts", compression: "Compression") -> str:
    from paceline.core.units import format_binary_bytes, format_decimal, format_seconds
    from paceline.records.schema import with_interval

    lines = [
        f"parameters  {predicted.num_parameters:,}",
        f"tokens      {predicted.tokens:,}",
        f"compute     {format_decimal(predicted.flops or 0.0, 'FLOPs')}",
    ]
    parts = ", ".join(
        f"{name.replace('_', ' ')} {format_binary_bytes(num_bytes)}"
        for name, num_bytes in dataclasses.asdict(memory).items()
    )
    total = format_binary_bytes(memory.total)
    lines.append(f"memory      {total} at the peak: {parts}")
    if (process := predicted.corrected["memory_bytes"]).low is not None:
        text = with_interval(process, format_binary_bytes)
        lines.append(f"process     {text} by earlier runs on this machine")
    if predicted.kept_in_memory_bytes:
        kept = format_binary_bytes(predicted.kept_in_memory_bytes)
        lines.append(
            f"kept        {kept} of host memory per rank for checkpoint.memory_every_steps"
        )
    if (step := predicted.corrected.get("step_time_s")) is None:
        lines.append(
            "time        not predicted: give --calibration records of paceline calibrate"
            if compression == "none"
            else f"time        not predicted with parallel.compression {compression}"
        )
    else:
        lines.append(
            f"time        {with_interval(step, format_seconds)} per step, "
            f"{format_seconds(step.value * predicted.num_steps)} in total"
        )
    if (loss := predicted.final_loss) is not None:
        lines.append(f"loss        {loss.value:.4f} at the end ({loss.low:.4f} to {loss.high:.4f})")
    return "\n".join(lines)
