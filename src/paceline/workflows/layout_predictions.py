"""Predicts measured layouts with the planner, from a calibration of the same ranks."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from paceline.benchmarks.config import parse_layout
from paceline.core.errors import UsageError
from paceline.core.specs import ModelShape, Precision
from paceline.planner.calibrations.ranks import cluster_of_ranks
from paceline.planner.cost.cluster import Cluster
from paceline.planner.cost.layouts import Layouts, Workload
from paceline.planner.cost.step_time import step_time
from paceline.planner.trainer_memory import TrainerStep, trainer_peak_bytes
from paceline.predict.calibration import TOPOLOGY_FIELDS, Calibration, calibrations
from paceline.records import CaseValue, Metric, Record
from paceline.records.kinds import MODEL_FIELDS, PREDICTION, PREDICTS

_METHOD = ("baseline", "warmup", "rounds")


def layout_predictions(
    records: Sequence[Record], calibration: Iterable[Record]
) -> Iterator[Record]:
    """Yields the prediction for every measured layout: time by term, and memory.

    Layouts with a zero-bubble schedule are skipped, because the planner does not model it.

    Args:
        records: Records of `paceline bench layout`.
        calibration: Records of `paceline calibrate` on the same ranks; for ranks on several hosts,
            also records of the ranks of one host.
    """
    known = calibrations(calibration)
    for record in records:
        if record.kind == "layout" and record.outcome == "ok" and not _is_zero_bubble(record):
            cluster = functools.partial(
                cluster_of_ranks, _matching(known, record), inside=_inside_host(known, record)
            )
            case = {name: value for name, value in record.case.items() if name not in _METHOD}
            yield Record(
                kind=PREDICTION,
                case={PREDICTS: "layout", **case},
                environment=record.environment,
                metrics=_predict(record, cluster),
                outcome="ok",
            )


def _is_zero_bubble(record: Record) -> bool:
    return parse_layout(str(record.case["layout"])).zero_bubble


def _matching(known: Sequence[Calibration], record: Record) -> Calibration:
    wanted = {field: record.case.get(field) for field in TOPOLOGY_FIELDS}
    found = _find(known, wanted)
    if found is None:
        text = ", ".join(f"{field} {value}" for field, value in wanted.items() if value is not None)
        raise UsageError(
            f"--calibration: no record measured with {text}; run paceline calibrate on these ranks"
        )
    return found


def _inside_host(known: Sequence[Calibration], record: Record) -> Calibration | None:
    """Returns the calibration of one host's ranks; None for one host, or one rank per host."""
    ranks, hosts = int(str(record.case["world_size"])), int(str(record.case["num_hosts"]))
    if hosts == 1 or ranks == hosts:
        return None
    return _find(
        known, {"world_size": ranks // hosts, "num_hosts": 1, "device": record.case["device"]}
    )


def _find(known: Sequence[Calibration], wanted: Mapping[str, CaseValue]) -> Calibration | None:
    for calibration in known:
        if all(calibration.topology.get(field) == value for field, value in wanted.items()):
            return calibration
    return None


def _predict(record: Record, cluster: Callable[[Workload], Cluster]) -> dict[str, Metric]:
    case = record.case
    written = parse_layout(str(case["layout"]))
    numbers = {field: case[field] for field in MODEL_FIELDS if field != "model"}
    context_length, batch_size = int(str(case["context"])), int(str(case["batch_size"]))
    layout = written.layout
    num_micro_batches = written.num_micro_batches(batch_size)
    workload = Workload(
        shape=ModelShape(**numbers, max_context_length=context_length),  # type: ignore[arg-type]
        precision=Precision(),
        context_length=context_length,
        micro_batch=written.micro_batch,
        num_micro_batches=num_micro_batches,
    )
    step = TrainerStep(
        shape=workload.shape,
        context_length=context_length,
        micro_batch=written.micro_batch,
        num_micro_batches=num_micro_batches,
    )
    # FSDP2 shards over the context-parallel ranks too.
    arrays = dataclasses.replace(Layouts.of([layout]), shards_context=True)
    # On a CPU, FSDP2's collectives block until the data has arrived: nothing is overlapped.
    time = step_time(arrays, workload, cluster(workload), hidden=0.0)
    values = {
        "step_time_s": time.total_s,
        "peak_bytes": trainer_peak_bytes(layout, step),
        **{name: value for name, value in vars(time).items() if np.any(value)},
    }
    return {name: Metric(value=float(np.ravel(value)[0])) for name, value in values.items()}
