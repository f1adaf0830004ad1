"""``paceline plan step`` and ``paceline plan backtest``: step predictions and their errors.

``paceline plan calibrate``: calibrates the planner from the user's own measured runs.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import tyro

from paceline.benchmarks.options import PlannedModel, StrategyChoice
from paceline.cli.output import FigurePath, Flat, OutputOptions, given_flags
from paceline.core.errors import RecordError, UsageError
from paceline.core.specs import BatchShape, nearest_buildable, require_context
from paceline.core.strategies import BUCKET_STRATEGIES, DEFAULT_BUCKET_SIZE_MB, StrategyName
from paceline.planner.search.cluster_options import require_some_context

if TYPE_CHECKING:
    from paceline.planner.calibrations.calibration import FrameworkCalibration
    from paceline.planner.calibrations.cases import Case
    from paceline.predict.backtest import BacktestCase, PredictedCase
    from paceline.records import Record
    from paceline.reports.tables.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanStepCommand:
    """Predict the time of a training step from a calibration of the machine."""

    calibration: pathlib.Path
    """Records of paceline calibrate; each topology in them gets a prediction."""
    model: tuple[PlannedModel, ...] = ("bytes-34M",)
    """Models: presets, Hugging Face directories, TOML files with [model], or dimensions. A model
    that Paceline's trainer does not build is predicted as one with the same matrices."""
    strategies: tuple[StrategyChoice, ...] = ("torch_ddp", "ddp", "zero2")
    """Data-parallel strategies, as in bench ddp; with one rank, only none is predicted."""
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB
    """Bucket size in MiB, for the strategies that have buckets."""
    batch: tuple[int, ...] = (4,)
    """Sequences per rank and step."""
    context: int = 128
    """Context length, in tokens."""
    backtest: pathlib.Path | None = None
    """Records of earlier predictions and measurements, used to correct these predictions and to
    give them an interval."""
    store: pathlib.Path | None = None
    """JSON Lines file to append the predictions to, for plan backtest."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if not self.bucket_size_mb > 0:
            raise UsageError("--bucket-size-mb must be positive")

    def run(self) -> int:
        """Predicts every case on every calibrated topology."""
        from paceline.predict.backtest import fit_correction, predict_step
        from paceline.predict.calibration import calibrations
        from paceline.records.environment import capture_environment
        from paceline.reports.tables.table import records_table

        if not self.calibration.exists():
            raise UsageError(
                f"{self.calibration}: no such file; paceline calibrate --store "
                f"{self.calibration} makes one"
            )
        places = calibrations(_read_records(self.calibration))
        if not places:
            raise UsageError(f"{self.calibration}: no calibration in it; run paceline calibrate")
        known = None if self.backtest is None else _read_cases((self.backtest,))
        correction = None if known is None else fit_correction(known)
        environment = capture_environment()
        # Predict all cases before storing any, so that an error leaves the store unchanged.
        predictions = [
            predict_step(case, place, environment, correction)
            for place in places
            for case in self._cases(place.world_size)
        ]
        predictions = list(self.output.keep(predictions, self.store))
        self.output.show((), records_table(predictions))
        return 0

    def _cases(self, world_size: int) -> "Iterator[PredictedCase]":
        from paceline.accounting.named_model import find_model
        from paceline.predict.backtest import PredictedCase

        strategies: tuple[StrategyName, ...] = self.strategies if world_size > 1 else ("none",)
        models = [find_model(named) for named in self.model]
        for model, batch, strategy in itertools.product(models, self.batch, strategies):
            if model.experts is not None:
                raise UsageError(
                    f"{model.name} is a mixture of experts, which paceline train does not run; "
                    "paceline plan search predicts it"
                )
            require_context(model.name, model.shape, self.context)
            yield PredictedCase(
                model=model.name,
                shape=nearest_buildable(model.shape),
                batch=BatchShape(num_sequences=batch, context_length=self.context),
                strategy=strategy,
                bucket_size_mb=self.bucket_size_mb if strategy in BUCKET_STRATEGIES else None,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BacktestCommand:
    """Compare predictions with measurements: the error of each case, corrected by the others.

    Without files, summarizes all predictions for runs on this machine, by kind.
    """

    records: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional] = ()
    """Files with predictions of paceline plan step and records of paceline bench ddp."""
    holdout: tuple[pathlib.Path, ...] = ()
    """Files with held-out cases, predicted from the other files and left out of the summary."""
    figure: FigurePath | None = None
    """Also draw all cases: a file that ends in .png or .svg."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if not self.records and (self.holdout or self.figure is not None):
            raise UsageError("--holdout and --figure need files of records; give them as arguments")

    def run(self) -> int:
        """Predicts each case from the others; without files, summarises the history of runs."""
        if not self.records:
            return self._print_history()
        from paceline.predict.backtest import accuracy, leave_one_out, predict_others
        from paceline.reports.tables.predictions import backtest_table

        cases = _read_cases(self.records)
        held_out = leave_one_out(cases)
        if self.holdout:
            held_out += predict_others(_read_cases(self.holdout), cases)
        found = accuracy(held_out[: len(cases)])
        row = {"num_cases": found.num_predicted, "coverage": found.coverage}
        rows = [*held_out, row | dataclasses.asdict(found)]
        self.output.show(rows, backtest_table(held_out, counted=len(cases)))
        if self.figure is not None:
            from paceline.reports.plots.planning import plot_backtest
            from paceline.reports.plots.style import save_as

            save_as(plot_backtest(held_out, counted=len(cases)), self.figure)
        return 0

    def _print_history(self) -> int:
        from paceline.predict.history import accuracy_by_quantity, history_path, read_history
        from paceline.reports.tables.predictions import coverage_table

        path = history_path()
        found = accuracy_by_quantity(read_history(path))
        if not found:
            raise UsageError(
                f"{path}: no predictions yet; paceline loop, and paceline train with "
                "--calibration, write them"
            )
        rows = [{"quantity": name} | dataclasses.asdict(each) for name, each in found.items()]
        self.output.show(rows, coverage_table(found, f"All predictions in {path}"))
        return 0


def _read_cases(paths: tuple[pathlib.Path, ...]) -> "list[BacktestCase]":
    from paceline.predict.backtest import backtest_cases

    return backtest_cases(record for path in paths for record in _read_records(path))


def _read_records(path: pathlib.Path) -> "list[Record]":
    """Reads records that the user names: what cannot be read is a usage error."""
    from paceline.records import RecordStore

    try:
        return list(RecordStore(path).read())
    except RecordError as error:
        raise UsageError(str(error)) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateRowsCommand:
    """Calibrate the planner for a framework and device from your own measured runs.

    Each row is a JSON object with the fields of the published runs: framework, model, device,
    precision, devices, context_length, global_batch, micro_batch, data, measured and unit, and
    every parallel axis that is not 1. Instead of measured and unit, a row may name a log of
    torchtitan, Megatron-LM or NeMo, metrics of TensorBoard or Weights & Biases, or a run of
    paceline train. Rows of several frameworks give several calibrations.
    """

    rows: Annotated[pathlib.Path, tyro.conf.Positional]
    """JSON Lines file of measured runs."""
    with_published: bool = False
    """Also fit the published runs of the same framework; a few runs of your own are then enough."""
    out: pathlib.Path | None = None
    """JSON Lines file to write the calibrations to, for plan search --calibration."""
    model: PlannedModel | None = None
    """Also say which run to measure next, for a plan of this model."""
    devices: int = 64
    """Number of devices of that plan."""
    batch_tokens: str = "4M"
    """Tokens per step of that plan, such as 4M (4 x 2^20)."""
    context: int | None = None
    """Context length of that plan; by default, the model's maximum."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise UsageError("--devices must be at least 1")
        if self.out is not None and self.out.suffix != ".jsonl":
            raise UsageError(f"--out {self.out}: give a name that ends in .jsonl")
        require_some_context(self.context)
        if self.model is None:
            for flag in given_flags(self, ("devices", "batch_tokens", "context")):
                raise UsageError(
                    f"{flag} describes the plan of --model; name a model, or leave it out"
                )

    def run(self) -> int:
        """Fits the rows and prints constants, and how far predictions are off."""
        from paceline.planner.calibrations.calibration import write_calibrations
        from paceline.planner.calibrations.pooled import calibrate_rows, measured_cases
        from paceline.reports.tables.planning import calibrations_table

        cases = measured_cases(self.rows)
        made = calibrate_rows(cases, with_published=self.with_published)
        if self.out is not None:
            write_calibrations(made, self.out)
        rows: list[dict[str, object]] = [
            {"name": each.name, "rows": len(each.rows), **each.constants} for each in made
        ]
        tables: list[object] = [calibrations_table(made)]
        if self.model is not None:
            more, table = self._next_runs(self.model, cases, made)
            rows += more
            tables.append(table)
        self.output.show(rows, *tables)
        return 0

    def _next_runs(
        self, model: str, cases: "list[Case]", made: "list[FrameworkCalibration]"
    ) -> "tuple[list[dict[str, object]], Table]":
        """Returns the runs to measure next for the framework, device and dtype of the first run."""
        from paceline.accounting.named_model import find_model
        from paceline.planner.calibrations.pooled import pooled
        from paceline.planner.search.cluster_options import ClusterOptions
        from paceline.planner.search.measure_next import runs_to_measure
        from paceline.planner.search.spec import calibrated_performance
        from paceline.reports.tables.planning import next_runs_table

        first = cases[0]
        named = find_model(model)
        own = [each for each in cases if each.pool == first.pool]
        options = ClusterOptions(
            device=first.device, batch_tokens=self.batch_tokens, context=self.context
        )
        fitted = next(
            each for each in made if (each.device, each.precision) == (first.device, first.dtype)
        )
        spec = options.spec(named.shape, self.devices, experts=named.experts)
        spec = dataclasses.replace(
            spec, framework_settings=fitted.framework_settings, precision=fitted.training_precision
        )
        now, found = runs_to_measure(
            pooled().prior.fit(own), first, spec, calibrated_performance(fitted)
        )
        rows: list[dict[str, object]] = [
            {"kind": "measure next", "half_width_now": now, "run": each} for each in found
        ]
        return rows, next_runs_table(named.name, self.devices, now, found)
