"""Predicts measured layouts with the planner, from a calibration of the same ranks."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from paceline.benchmarks.options import parse_layout
from paceline.core.errors import UsageError
from paceline.core.specs import ModelShape
from paceline.predict.calibration import TOPOLOGY_FIELDS, Calibration, calibrations, inside_host
from paceline.predict.layout_step import layout_step_time
from paceline.predict.trainer_memory import TrainerStep, trainer_memory
from paceline.records import Metric, Record
from paceline.records.kinds import MODEL_FIELDS, PREDICTION, PREDICTS

_METHOD = ("baseline", "warmup", "rounds")


def layout_predictions(
    records: Sequence[Record], calibration: Iterable[Record]
) -> Iterator[Record]:
    """Yields the prediction for every measured layout: time by term, and memory.

    Older records of a zero-bubble schedule are skipped: neither trainer nor planner has it.

    Args:
        records: Records of `paceline bench layout`.
        calibration: Records of `paceline calibrate` on the same ranks; for ranks on several hosts,
            also records of the ranks of one host.
    """
    known = calibrations(calibration)
    for record in records:
        if record.kind == "layout" and record.outcome == "ok" and not _is_zero_bubble(record):
            calibrated = _matching(known, record)
            inside = inside_host(known, calibrated)
            case = {name: value for name, value in record.case.items() if name not in _METHOD}
            yield Record(
                kind=PREDICTION,
                case={PREDICTS: "layout", **case},
                environment=record.environment,
                metrics=_predict(record, calibrated, inside),
                outcome="ok",
            )


def _is_zero_bubble(record: Record) -> bool:
    return "zb=1" in str(record.case["layout"]).split(",")


def _matching(known: Sequence[Calibration], record: Record) -> Calibration:
    wanted = {field: record.case.get(field) for field in TOPOLOGY_FIELDS}
    for calibration in known:
        if all(calibration.topology.get(field) == value for field, value in wanted.items()):
            return calibration
    text = ", ".join(f"{field} {value}" for field, value in wanted.items() if value is not None)
    raise UsageError(
        f"--calibration: no record measured with {text}; run paceline calibrate on these ranks"
    )


def _predict(
    record: Record, calibration: Calibration, inside: Calibration | None
) -> dict[str, Metric]:
    case = record.case
    written = parse_layout(str(case["layout"]))
    numbers = {field: case[field] for field in MODEL_FIELDS if field != "model"}
    context_length, batch_size = int(str(case["context"])), int(str(case["batch_size"]))
    step = TrainerStep(
        shape=ModelShape(**numbers, max_context_length=context_length),  # type: ignore[arg-type]
        context_length=context_length,
        micro_batch=written.micro_batch,
        num_micro_batches=written.num_micro_batches(batch_size),
    )
    time = layout_step_time(written.layout, step, calibration, inside)
    values = {
        "step_time_s": time.total_s,
        "peak_bytes": trainer_memory(written.layout, step).total,
        **{name: value for name, value in vars(time).items() if np.any(value)},
    }
    return {name: Metric(value=float(np.ravel(value)[0])) for name, value in values.items()}
