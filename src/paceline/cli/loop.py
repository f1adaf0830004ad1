"""``paceline loop`` turns a FLOP budget into a model; ``paceline demo`` shows it in minutes."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from paceline.cli.output import (
    Flat,
    OutputOptions,
    case_progress,
    require_positive,
    say,
    work_progress,
)
from paceline.cli.plan_search import ClusterFlags
from paceline.cli.sweep import SweepProgress
from paceline.core.errors import UsageError
from paceline.core.specs import BatchShape, ModelShape
from paceline.core.units import parse_seconds
from paceline.planner.search.cluster_options import UNNAMED_CONTEXT

if TYPE_CHECKING:
    from paceline.loop.directory import LoopDirectory, LoopSpec, Outcome
    from paceline.planner.search.spec import SearchSpec
    from paceline.training.config import RunConfig

_CALIBRATION_S = 20.0
_BY_LAW = "law"
"""Default of --batch-tokens: the batch that Step Law suggests for the run's tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopCommand:
    """Turn a budget of FLOPs into a trained model: sweep, fit, choose, plan, train, compare.

    Trains on this machine with a run.toml that names the data; with --devices and --dry-run, only
    plans for a cluster. You can interrupt it at any time; the same command resumes.
    """

    config: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")] = (
        pathlib.Path("run.toml")
    )
    """Config that all runs share, as for paceline train: data, context, precision. The loop
    chooses model size, steps, batch size and learning rate."""
    budget: float
    """FLOPs of the final training run."""
    deadline: str | None = None
    """Time for the whole loop, such as 60min or 24h; a budget that takes longer is refused."""
    out: pathlib.Path = pathlib.Path("loop")
    """Directory of the loop; loop.html in it is the page to open."""
    exploration: float = 0.5
    """FLOPs of the sweep as a fraction of the budget; more FLOPs mean less extrapolation."""
    epochs: float = 4.0
    """Maximum number of epochs over the training text in a run."""
    seed: int = 0
    """Random seed of the initial weights and the data order."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Override a key of the config, such as evaluation.sequences=128."""
    at_once: int | None = None
    """Concurrent runs of the sweep; by default one, or one per core, whichever is measured to
    train more tokens per second."""
    dry_run: bool = False
    """Print what the loop would do, what it costs and how certain that is, and stop."""
    devices: int | None = None
    """With --dry-run: plan for a cluster of this many devices of the kind --device."""
    cluster: Flat[ClusterFlags] = dataclasses.field(
        default_factory=lambda: ClusterFlags(batch_tokens=_BY_LAW)
    )
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        numbers = {"--budget": self.budget, "--exploration": self.exploration}
        require_positive({**numbers, "--epochs": self.epochs})
        if self.at_once is not None and self.at_once < 1:
            raise UsageError("--at-once must be at least 1")
        if self.devices is not None and self.devices < 1:
            raise UsageError("--devices must be at least 1")
        if self.devices is not None and not self.dry_run:
            raise UsageError(
                "--devices only plans for a cluster and needs --dry-run; to train there, use "
                "paceline sweep --executor slurm, then paceline scaling fit and plan search"
            )

    @property
    def _deadline_s(self) -> float | None:
        return None if self.deadline is None else parse_seconds(self.deadline, "deadline")

    def run(self) -> int:
        """Runs the loop, or prints its plan."""
        if self.devices is not None:
            return self._plan_on_cluster(self.devices)
        from paceline.loop.directory import PAGE, LoopDirectory, LoopSpec
        from paceline.loop.page import write_loop_page
        from paceline.loop.run_config import limits_of
        from paceline.predict.history import history_path
        from paceline.reports.tables.predictions import outcome_table
        from paceline.training.toml_config import read_config

        base = read_config(self.config, self.set)
        limits = limits_of(base, epochs=self.epochs, seed=self.seed)
        spec = LoopSpec(budget=self.budget, exploration=self.exploration, **limits)
        if self.dry_run:
            return self._plan_here(spec)
        directory = LoopDirectory(self.out)
        outcome = self._go_round(directory, spec, base)
        with work_progress("writing the page"):
            write_loop_page(directory, history_path())
        caption = f"{self.budget:.3g} FLOPs: predicted and measured"
        self.output.show(outcome.entries, outcome_table(outcome.entries, caption))
        say(f"page: {self.out / PAGE}")
        return 0

    def _go_round(
        self, directory: "LoopDirectory", spec: "LoopSpec", base: "RunConfig"
    ) -> "Outcome":
        from paceline.core.host import available_processors
        from paceline.core.processes import termination_as_exit
        from paceline.loop.executors import LocalExecutor
        from paceline.loop.run import LoopRunner
        from paceline.predict.history import history_path

        cores = available_processors()
        powers = (2**power for power in range(cores.bit_length()))
        with SweepProgress(directory.sweep).open() as progress, termination_as_exit():
            runner = LoopRunner(
                directory=directory,
                sweep=progress.runner(1, self.at_once),
                trainer=LocalExecutor(1, progress.wait),
                calibrate=_calibrate,
                ranks=sorted({*powers, cores}),
                history=history_path(),
                deadline_s=self._deadline_s,
                tell=_tell,
            )
            return runner.run(spec, base)

    def _plan_here(self, spec: "LoopSpec") -> int:
        from paceline.loop.on_paper import expected_final
        from paceline.loop.sweep import plan_table
        from paceline.loop.sweep_design import first_runs, require_sizes

        require_sizes(spec.sweep)
        runs = [*first_runs(spec.sweep), expected_final(spec)]
        self.output.show(
            runs,
            plan_table(runs, [None] * len(runs)),
            "final is the model that published scaling laws suggest; the sweep decides which model "
            "is trained. Times are predicted after the calibration, the first stage of the loop",
        )
        return 0

    def _plan_on_cluster(self, devices: int) -> int:
        from paceline.loop.on_paper import cluster_table, in_time, plan_on_cluster
        from paceline.reports.tables.planning import advice_table

        cluster = self.cluster

        def ask(shape: ModelShape, batch_tokens: int) -> "SearchSpec":
            if cluster.batch_tokens != _BY_LAW:
                return cluster.spec(shape, devices)
            asked = dataclasses.replace(cluster, batch_tokens=str(batch_tokens))
            return asked.spec(shape, devices)

        with work_progress("searching layouts"):
            plan = plan_on_cluster(
                self.budget,
                self.exploration,
                cluster.context or UNNAMED_CONTEXT,
                ask,
                cluster.performance(),
                lower_precision=cluster.lower_precision(),
                peak_flops=cluster.peak_flops(),
                price=cluster.price,
                device_interval_h=cluster.failure_interval_h,
            )
        row = {"kind": "loop", "budget": plan.budget, "devices": devices}
        row |= {"parameters": plan.parameters, "loss": plan.loss, "shape": plan.shape}
        row |= {"tokens": plan.tokens, "layout": plan.found.best, "run": plan.run}
        row |= {"sweep_flops": plan.sweep_flops, "sweep_days": plan.sweep_days}
        row |= {"wasted": plan.wasted, "source": plan.found.performance.note}
        table = cluster_table(plan, in_time(plan, self._deadline_s))
        self.output.show([row], table, advice_table(plan.changes))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Train a small model over an emulated network, and compare it with its prediction.

    Prepares the text of Python's manual, calibrates this machine, plans, trains on two ranks with
    a 1 Gbit/s link between them, writes an HTML page and generates a sample, in under five minutes
    on two cores. Shows every command before running it.
    """

    out: pathlib.Path = pathlib.Path("demo")
    """Directory for all files; demo.html in it is the page to open."""
    steps: int = 400
    """Training steps."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError("--steps must be at least 1")

    def run(self) -> int:
        """Runs the demo and prints its results."""
        from paceline.core.processes import termination_as_exit
        from paceline.loop.demo import PROMPT, Demo
        from paceline.reports.tables.predictions import outcome_table

        if self.out.exists():
            raise UsageError(f"{self.out} already exists; name another directory with --out")
        self.out.mkdir(parents=True, exist_ok=True)
        with termination_as_exit():
            made = Demo(directory=self.out, steps=self.steps, say=say).run()
        table = outcome_table(made.entries, "Predicted and measured")
        text = f"{PROMPT} → {made.sample}\n\npage: {made.page}\npicture: {made.picture}"
        self.output.show([made], table, text)
        return 0


def _calibrate(
    models: Sequence[tuple[ModelShape, BatchShape]], ranks: int, store: pathlib.Path
) -> None:
    """Measures the steps of models on this machine, and appends the records to a file."""
    from paceline.benchmarks.calibration import calibration_records
    from paceline.benchmarks.config import ShapeCalibration
    from paceline.records import RecordStore

    sweep = ShapeCalibration(models=tuple(models), world_size=ranks, time_limit_s=_CALIBRATION_S)
    with case_progress(1) as progress:
        for record in calibration_records(sweep, progress.step):
            RecordStore(store).append(record)


def _tell(stage: str, lines: Sequence[str]) -> None:
    for line in lines:
        say(f"{stage}: {line}")
