"""``paceline sweep``: trains small models to find out how large a model to train."""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from paceline.cli.output import OutputOptions, require_positive, say, stderr_console
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from rich.live import Live

    from paceline.loop.executors import RunTask
    from paceline.loop.sweep import MakeExecutor, SweepRunner
    from paceline.loop.sweep_design import SweepSpec
    from paceline.loop.sweep_directory import SweepDirectory, SweepState
    from paceline.training.config import RunConfig

_LARGEST = 1 / 8
"""FLOPs of the largest runs relative to the target; extrapolating further is unreliable."""
_LIVE_PAUSE_S, _PAUSE_S = 2.0, 60.0
"""Seconds between progress updates of active runs, with and without a terminal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepCommand:
    """Train the small models that tell how large a model to train with a budget of FLOPs.

    A few runs first check the learning rate and batch size; small runs of many sizes then explore,
    and larger runs refine. You can interrupt it at any time; the same command resumes.
    """

    config: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")]
    """Config that all runs share, as for paceline train: data, context, precision. The sweep
    chooses model size, steps, batch size and learning rate."""
    target: float
    """FLOPs of the large run whose best model you want to find."""
    out: pathlib.Path = pathlib.Path("sweep")
    """Directory of the sweep; paceline scaling fit reads runs.jsonl in it."""
    budget: float | None = None
    """Approximate FLOPs of all runs together. By default about one and a half times the target,
    with runs of up to an eighth of the target."""
    epochs: float = 4.0
    """Maximum number of epochs over the training text in a run."""
    seed: int = 0
    """Random seed of the initial weights and the data order."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Override a key of the config, such as evaluation.sequences=128."""
    ranks: int = 1
    """Ranks per run."""
    executor: Literal["local", "slurm", "ray"] = "local"
    """Where to train: on this machine, as a Slurm job array, or on a Ray cluster."""
    at_once: int | None = None
    """Concurrent runs. On this machine, by default one, or one per core, whichever is measured to
    train more tokens per second."""
    partition: str | None = None
    """Slurm partition."""
    time_limit_min: int = 60
    """Time limit of a Slurm job in minutes; its run then resumes in another job."""
    ray_address: str | None = None
    """Address of the Ray cluster; by default RAY_ADDRESS, or a new cluster on this machine."""
    calibration: pathlib.Path | None = None
    """Records of paceline calibrate, used by --dry-run to predict times."""
    dry_run: bool = False
    """Print the first runs of the sweep and their cost, and stop."""
    output: OutputOptions

    def __post_init__(self) -> None:
        numbers = {"--target": self.target, "--budget": self.budget, "--epochs": self.epochs}
        require_positive(numbers)
        if self.ranks < 1 or (self.at_once is not None and self.at_once < 1):
            raise UsageError("--ranks and --at-once must be at least 1")
        if self.ray_address is not None and self.executor != "ray":
            raise UsageError("--ray-address needs --executor ray")
        if self.partition is not None and self.executor != "slurm":
            raise UsageError("--partition needs --executor slurm")

    def run(self) -> int:
        """Runs the sweep, or prints its plan."""
        from paceline.core.processes import termination_as_exit
        from paceline.loop.sweep import sweep_table
        from paceline.loop.sweep_design import CHECKS, FIT
        from paceline.loop.sweep_directory import ROWS, SweepDirectory
        from paceline.training.toml_config import read_config

        base = read_config(self.config, self.set)
        spec = self._spec(base)
        if self.dry_run:
            return self._print_plan(spec, base)
        directory = SweepDirectory(self.out)
        with SweepProgress(directory).open() as progress, termination_as_exit():
            runner = progress.runner(self.ranks, self.at_once, self._make_executor())
            findings = runner.run(spec, base)
        rows = [*directory.rows(*CHECKS, FIT), *findings]
        self.output.show(rows, sweep_table(directory), *map(str, findings))
        say(f"next: paceline scaling fit {self.out / ROWS} --budgets {self.target:g}")
        return 0

    def _spec(self, base: "RunConfig") -> "SweepSpec":
        from paceline.loop.run_config import limits_of
        from paceline.loop.sweep_design import COST_OF_LARGEST, SweepSpec

        return SweepSpec(
            target=self.target,
            largest=min(_LARGEST * self.target, (self.budget or math.inf) / COST_OF_LARGEST),
            **limits_of(base, epochs=self.epochs, seed=self.seed),
        )

    def _print_plan(self, spec: "SweepSpec", base: "RunConfig") -> int:
        from paceline.loop.run_config import run_config
        from paceline.loop.sweep import plan_table
        from paceline.loop.sweep_design import first_runs, refining_flops
        from paceline.training.forecast import forecast

        runs = first_runs(spec)
        times = [
            forecast(run_config(base, run, self.out), self.ranks, self.calibration).duration_s
            for run in runs
        ]
        self.output.show(
            runs,
            plan_table(runs, times),
            f"then about {refining_flops(spec):.3g} FLOPs on runs of up to "
            f"{spec.largest:.3g}, near the model sizes that do best in these runs",
        )
        if self.calibration is None and not self.output.json:
            say("times: not predicted; give --calibration records of paceline calibrate")
        return 0

    def _make_executor(self) -> "MakeExecutor | None":
        from paceline.loop.executors import RayExecutor, SlurmExecutor

        if self.executor == "slurm":
            limits = (self.at_once, self.partition, self.time_limit_min)
            return lambda _state: SlurmExecutor(self.out, *limits)
        if self.executor == "ray":
            return lambda _state: RayExecutor(self.ray_address, self.at_once)
        return None


class SweepProgress:
    """Shows the progress of a sweep: a live table on a terminal, lines elsewhere."""

    def __init__(self, directory: "SweepDirectory") -> None:
        self._directory = directory
        self._console = stderr_console()
        self._live: Live | None = None
        self._shown_s = time.monotonic()

    @contextlib.contextmanager
    def open(self) -> "Iterator[SweepProgress]":
        """Shows a live table while open, if stderr is a terminal."""
        from rich.live import Live

        if not self._console.is_terminal:
            yield self
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield self
        self._live = None

    def runner(
        self, ranks: int, at_once: int | None, make_executor: "MakeExecutor | None" = None
    ) -> "SweepRunner":
        """Returns a runner of the sweep; by default, its runs train on this machine."""
        from paceline.core.host import threads_per_rank
        from paceline.loop.executors import LocalExecutor, runs_at_once
        from paceline.loop.sweep import SweepRunner

        def make_local(state: "SweepState") -> LocalExecutor:
            number = runs_at_once(self._directory, state, ranks, at_once, say)
            return LocalExecutor(number, self.wait)

        def threads(state: "SweepState") -> int:
            is_local = make_executor is None
            return threads_per_rank(ranks * (at_once or state.at_once or 1)) if is_local else 1

        return SweepRunner(
            directory=self._directory,
            make_executor=make_executor or make_local,
            ranks=ranks,
            threads=threads,
            on_change=self.change,
        )

    def change(self) -> None:
        """Shows planned and ended runs."""
        from paceline.loop.sweep import sweep_table

        self._shown_s = time.monotonic()
        if self._live is None:
            say(sweep_table(self._directory).caption)
        else:
            self._live.update(sweep_table(self._directory), refresh=True)

    def wait(self, running: "Sequence[RunTask]") -> None:
        """Shows the progress of active runs at regular intervals."""
        from paceline.loop.sweep import progress_text

        pause_s = _PAUSE_S if self._live is None else _LIVE_PAUSE_S
        if time.monotonic() - self._shown_s < pause_s:
            return
        self._shown_s = time.monotonic()
        lines = [f"{task.label}: {progress_text(pathlib.Path(task.directory))}" for task in running]
        if self._live is None:
            for line in lines:
                say(line)
        elif self._directory.exists:
            from rich.console import Group

            from paceline.loop.sweep import sweep_table

            self._live.update(Group(sweep_table(self._directory), *lines), refresh=True)
