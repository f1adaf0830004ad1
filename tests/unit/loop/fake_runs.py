"""Fake runs of a sweep, without training: losses lie on a known surface."""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence

from paceline.accounting.counts import count_parameters, flops_per_token
from paceline.data.loader.config import SourceConfig
from paceline.loop.executors import RunTask
from paceline.loop.sweep import SweepRunner
from paceline.loop.sweep_design import SweepSpec
from paceline.loop.sweep_directory import RunResult, SweepDirectory, write_result
from paceline.records import Metric, Record, RecordStore, capture_environment
from paceline.scaling.model_shapes import step_law_batch_tokens, suggested_learning_rate
from paceline.scaling.surface import LossSurface
from paceline.training.config import DataConfig, RunConfig
from paceline.training.run_directory import RECORD
from paceline.training.toml_config import read_config

SURFACE = LossSurface(0.8, 60.0, 0.34, 300.0, 0.36)
SPEC = SweepSpec(target=1e14, largest=1.25e13, vocab_size=256, context_length=256, most_tokens=5e7)
BASE = RunConfig(out="base", data=DataConfig(sources=(SourceConfig(place="tokens"),)))


@dataclasses.dataclass
class FakeExecutor:
    """Gives every run the loss of the surface; the best learning rate is half of the law's."""

    made: list[str] = dataclasses.field(default_factory=list)
    """Labels of the runs that were started."""
    dies_after: int | None = None
    """Number of runs after which the process dies, as by kill -9."""
    failing: Sequence[str] = ()
    killed: Sequence[str] = ()
    """Labels of runs that never finish."""
    resumed: Sequence[str] = ()
    """Labels of runs that finish in their second attempt."""

    def run(self, tasks: Sequence[RunTask]) -> Iterator[str]:
        for task in tasks:
            if self.dies_after is not None and len(self.made) >= self.dies_after:
                raise KeyboardInterrupt
            self.made.append(task.label)
            if task.label in self.killed:
                continue
            directory = pathlib.Path(task.directory)
            if task.label in self.failing:
                write_result(
                    directory, RunResult(outcome="diverged", reason="not finite", time_s=1.0)
                )
            else:
                config = read_config(pathlib.Path(task.config))
                _finish(directory, config, is_resumed=task.label in self.resumed)
            yield task.label


def make_sweep_runner(path: pathlib.Path, executor: FakeExecutor) -> SweepRunner:
    """Returns a sweep whose runs are executed by `executor`."""
    return SweepRunner(
        directory=SweepDirectory(path),
        make_executor=lambda _state: executor,
        ranks=1,
        threads=lambda _state: 1,
        on_change=lambda: None,
    )


def _finish(directory: pathlib.Path, config: RunConfig, *, is_resumed: bool) -> None:
    shape = config.model.shape
    parameters = count_parameters(shape).total
    tokens = config.training.steps * config.tokens_per_step
    for_batch = math.sqrt(config.tokens_per_step / step_law_batch_tokens(tokens))
    by_law = for_batch * suggested_learning_rate(parameters, 20 * parameters)
    factor = config.optimizer.learning_rate / by_law
    fitted = flops_per_token(shape, config.data.context_length).model / 6
    loss = float(SURFACE.loss(fitted, tokens)) * (1 + 0.01 * (factor - 0.5) ** 2)
    RecordStore(directory / RECORD).append(
        Record(
            kind="construction",
            case={
                "subject": "run",
                "parameters": parameters,
                "world_size": 1,
                "device": "cpu",
                "hardware": "none",
                "threads": 1,
            },
            environment=capture_environment(),
            metrics={
                "heldout_loss": Metric(value=loss),
                "step_time_s": Metric(value=0.01),
                "memory_bytes": Metric(value=4e8),
            },
            outcome="ok",
        )
    )
    time_s = 1.0 + tokens * parameters * 6e-11
    write_result(directory, RunResult(outcome="ok", time_s=time_s, is_resumed=is_resumed))
