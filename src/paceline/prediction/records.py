"""Records of predicted steps, and their join with measurements for the backtest."""

import dataclasses
from collections.abc import Iterable
from typing import TypeAlias

from paceline.core.errors import UsageError
from paceline.core.specs import BatchShape, ModelShape
from paceline.core.strategies import StrategyName
from paceline.core.units import format_decimal
from paceline.prediction.backtest import BacktestCase, Correction
from paceline.prediction.calibration import Calibration
from paceline.prediction.step import StepTerms, strategy_step_terms
from paceline.records import CaseValue, Environment, Metric, Record, join_key
from paceline.records.kinds import LINK_RATE, PREDICTION, PREDICTS, find_kind
from paceline.records.schema import model_case_fields

STEP = "step_time_s"
_MEASURED = "ddp"
_ByKey: TypeAlias = dict[tuple[CaseValue, ...], Record]
_TERMS = tuple(field.name for field in dataclasses.fields(StepTerms))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedCase:
    """A step to predict."""

    model: str
    shape: ModelShape
    batch: BatchShape
    strategy: StrategyName
    bucket_size_mb: float | None
    """Bucket size in MiB; None for the strategy's default, or if it has no buckets."""


def predict_step(
    case: PredictedCase,
    calibration: Calibration,
    environment: Environment,
    correction: Correction | None = None,
) -> Record:
    """Returns a record of the predicted step time and its terms, with an interval if corrected."""
    terms = strategy_step_terms(
        case.shape, case.batch, case.strategy, calibration, case.bucket_size_mb
    )
    step_time = Metric(value=terms.total_s)
    seconds = dataclasses.asdict(terms)
    if correction is not None:
        step_time = Metric.from_estimate(correction.apply(seconds))
    topology = {field: value for field, value in calibration.topology.items() if value is not None}
    return Record(
        kind=PREDICTION,
        case={
            PREDICTS: _MEASURED,
            "strategy": case.strategy,
            "bucket_size_mb": case.bucket_size_mb,
            **model_case_fields(case.model, case.shape, case.batch),
            "precision": "float32",
            "float32_matmul_precision": calibration.float32_matmul_precision,
            "compile": "none",
            "activation_checkpointing": "none",
            "attention": calibration.attention_implementation,
            "optimizer": "adamw-fused",
            **topology,
        },
        environment=environment,
        metrics={STEP: step_time, **{name: Metric(value=value) for name, value in seconds.items()}},
        outcome="ok",
    )


def backtest_cases(records: Iterable[Record]) -> list[BacktestCase]:
    """Joins predicted steps with their measurements, using the last record of each key."""
    predicted: _ByKey = {}
    measured: _ByKey = {}
    for record in records:
        if record.outcome != "ok" or record.measured_kind.name != _MEASURED:
            continue
        if record.kind != PREDICTION:
            measured[join_key(record)] = record
        elif all(term in record.metrics for term in _TERMS):
            predicted[join_key(record)] = record
    joined = [key for key in predicted if key in measured]
    if not joined:
        raise UsageError(
            f"none of {len(predicted)} predicted steps was measured, and none of {len(measured)} "
            f"measured steps was predicted{_first_difference(predicted, measured)}; run paceline "
            "plan step and paceline bench ddp with the same model, batch, strategies and ranks"
        )
    return [
        BacktestCase(
            labels=_labels(measured[key]),
            terms={term: predicted[key].metrics[term].value for term in _TERMS},
            measured_s=measured[key].metrics[STEP].value,
        )
        for key in joined
    ]


def _first_difference(predicted: _ByKey, measured: _ByKey) -> str:
    """Returns a message with the fields in which the first prediction misses its nearest match."""
    if not predicted or not measured:
        return ""
    prediction = next(iter(predicted.values())).case
    fields = find_kind(_MEASURED).join_key
    differences = [
        ", ".join(field for field in fields if prediction.get(field) != record.case.get(field))
        for record in measured.values()
    ]
    return f" (the nearest differ in {min(differences, key=len) or 'their links'})"


def _labels(record: Record) -> dict[str, str]:
    rate = record.case.get(LINK_RATE)
    link = "loopback" if rate is None else format_decimal(float(str(rate)), "bit/s")
    return {
        **{field: str(record.case[field]) for field in ("model", "batch", "context", "strategy")},
        "ranks": str(record.case["world_size"]),
        "link": link,
    }
