"""``paceline train``: trains a model from a config."""

import dataclasses
import os
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import tyro

from paceline.benchmarks.config import ModelName
from paceline.cli.output import Flat, OutputOptions, guarded, print_json, say
from paceline.core.errors import RecordError, UsageError
from paceline.core.processes import STOPPED, die_with_agent, termination_as_exit

if TYPE_CHECKING:
    from paceline.core.plan import Estimate
    from paceline.parallel.ranks.supervisor import Restart
    from paceline.training.config import RunConfig
    from paceline.training.forecast import Forecast

_TEMPLATE = "init"
_LEAVING_S = 3.0
"""Time for ranks to exit after saving, or after the grace period for saving has expired."""
_FIRST_RANK_SPEAKS_S = 5.0
_FEWEST_REPLICAS = 2
"""Replicas to start unless --ranks says otherwise: one has no other to heal from."""


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

        if self.plan is not None:
            return self._follow_plan(self.plan)
        config = read_config(pathlib.Path(self.config), self.set)
        if self.dry_run:
            return self._print_forecast(config)
        return self._train(config)

    def _follow_plan(self, path: pathlib.Path) -> int:
        """Runs the equivalent command line, with the plan expanded into --ranks and --set."""
        from paceline.training.plan import read_plan

        plan = read_plan(path)
        if self.ranks not in (None, plan.world_size):
            raise UsageError(f"--ranks {self.ranks}: {path} is a plan for {plan.world_size} ranks")
        changes = (*plan.changes, *self.set)
        return dataclasses.replace(self, plan=None, ranks=plan.world_size, set=changes).run()

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
        from paceline.training.forecast import earlier_runs, forecast
        from paceline.training.toml_config import encode_config

        predicted = None
        if config.model.hugging_face is None:
            predicted = dataclasses.replace(
                forecast(config, self._num_ranks(config), self.calibration, history=earlier_runs()),
                final_loss=self._final_loss(config),
            )
        if self.output.json:
            print_json({"config": config, "forecast": predicted})
            return 0
        text = "parameters, compute, memory and time: not predicted for a Hugging Face model"
        text = text if predicted is None else _forecast_text(predicted)
        sys.stdout.write(f"{encode_config(config)}\n{text}\n")
        return 0

    def _train(self, config: "RunConfig") -> int:
        die_with_agent(os.environ)  # Before torch is imported, which takes seconds.
        with termination_as_exit():
            return self._train_here(config)

    def _train_here(self, config: "RunConfig") -> int:
        from paceline.parallel.ranks.placement import is_launched
        from paceline.training.replica_launch import REPLICA, run_replicas

        if config.parallel.elastic == "replicas" and REPLICA not in os.environ:
            if self.supervise or is_launched(os.environ):
                raise UsageError(
                    "parallel.elastic replicas starts and restarts its replicas itself; leave out "
                    "--supervise and the launcher"
                )
            self._require_startable(config)
            grace_s = config.checkpoint.grace_s + _LEAVING_S
            return run_replicas(config, self._num_ranks(config), grace_s)
        if self.supervise:
            if is_launched(os.environ):
                raise UsageError(
                    "--supervise restarts only ranks that it has started itself; with torchrun use "
                    "its --max-restarts, with Slurm --requeue"
                )
            return self._supervise(config)
        if not is_launched(os.environ):
            self._require_startable(config)
        return self._be_rank(config, ())

    def _supervise(self, config: "RunConfig") -> int:
        # CUDA initialised here would be unusable in forked ranks, so torch queries NVML instead.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        from paceline.parallel.ranks.supervisor import supervise
        from paceline.training.preload import preload

        num_ranks = self._require_startable(config)
        preload()
        return supervise(
            lambda restarts: guarded(lambda: self._be_rank(config, restarts)),
            num_ranks=num_ranks,
            max_restarts=self.max_restarts,
            hang_s=config.parallel.timeout_s,
            grace_s=config.checkpoint.grace_s + _LEAVING_S,
        )

    def _be_rank(self, config: "RunConfig", restarts: "tuple[Restart, ...]") -> int:
        """Trains as one rank, or starts the ranks that train."""
        from paceline.health.errors import AgreedError
        from paceline.parallel import distributed_session
        from paceline.parallel.ranks.heartbeats import beat_final
        from paceline.training.replica_launch import REPLICA
        from paceline.training.run import run

        with distributed_session(
            ranks_per_host=1 if REPLICA in os.environ else self.ranks,
            device=config.parallel.device,
            timeout_s=config.parallel.timeout_s,
            grace_s=config.checkpoint.grace_s + _LEAVING_S,
        ) as session:
            try:
                final_loss = self._final_loss(config) if session.rank == 0 else None
                outcome = run(config, session, self.calibration, final_loss, restarts)
            except AgreedError as error:
                if error.is_final:
                    beat_final()
                if session.rank == 0:
                    raise
                # All ranks have the same error: rank 0 reports it, and ends the others.
                time.sleep(_FIRST_RANK_SPEAKS_S)
                raise SystemExit(error.exit_code) from None
            if session.rank == 0 and outcome.reports:
                if self.output.json:
                    print_json(outcome)
                else:
                    sys.stdout.write(f"{outcome.reason} after step {outcome.step:,}, loss ")
                    sys.stdout.write(f"{outcome.loss:.4f}; {config.out}\n")
                if outcome.reason == "finished" and self._is_predicted(config):
                    _remember(config)
        return 0 if outcome.reason == "finished" else STOPPED

    def _is_predicted(self, config: "RunConfig") -> bool:
        """Returns whether a prediction was requested and possible; it is then stored."""
        asked = self.calibration is not None or self.runs is not None
        return asked and config.model.hugging_face is None

    def _final_loss(self, config: "RunConfig") -> "Estimate | None":
        """Predicts the final loss from smaller runs, if given."""
        if self.runs is None:
            return None
        from paceline.accounting.parameters import count_parameters
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

    def _num_ranks(self, config: "RunConfig") -> int:
        """Returns the number of ranks to start on a host without GPUs."""
        return self.ranks or (_FEWEST_REPLICAS if config.parallel.elastic == "replicas" else 1)

    def _require_startable(self, config: "RunConfig") -> int:
        """Checks the config before starting ranks, which takes seconds; returns their number."""
        import torch

        from paceline.training.run import require_startable, usable_bytes

        if config.parallel.device == "cpu" or not torch.cuda.is_available():
            num_ranks = self._num_ranks(config)
            rank_bytes = usable_bytes(torch.device("cpu"), num_ranks)
        else:
            # Each rank queries its own GPU: a query here would use memory on the first one.
            num_ranks = self.ranks or torch.cuda.device_count()
            rank_bytes = None
        require_startable(config, num_ranks, rank_bytes)
        return num_ranks


def _remember(config: "RunConfig") -> None:
    """Adds a run to the history of predictions; a write error does not fail the run."""
    from paceline.training.history import append_run_history

    try:
        append_run_history(config)
    except RecordError as error:
        say(f"could not write the history of predictions: {error}")


def _forecast_text(predicted: "Forecast") -> str:
    from paceline.core.units import format_binary_bytes, format_decimal, format_seconds
    from paceline.reports.tables.columns import with_interval

    lines = [
        f"parameters  {predicted.num_parameters:,}",
        f"tokens      {predicted.tokens:,}",
        f"compute     {format_decimal(predicted.flops, 'FLOPs')}",
    ]
    parts = ", ".join(
        f"{name.replace('_', ' ')} {format_binary_bytes(num_bytes)}"
        for name, num_bytes in dataclasses.asdict(predicted.memory).items()
    )
    total = format_binary_bytes(predicted.memory.total)
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
        lines.append("time        not predicted: give --calibration records of paceline calibrate")
    else:
        lines.append(
            f"time        {with_interval(step, format_seconds)} per step, "
            f"{format_seconds(step.value * predicted.num_steps)} in total"
        )
    if (loss := predicted.final_loss) is not None:
        lines.append(f"loss        {loss.value:.4f} at the end ({loss.low:.4f} to {loss.high:.4f})")
    return "\n".join(lines)
