"""Answers from several ranks: all-reduce, data-parallel strategies, sharding."""

from collections.abc import Iterator, Sequence

from paceline.accounting.collectives import bus_factor
from paceline.core.strategies import StrategyName
from paceline.core.units import format_decimal
from paceline.course.answers import Answer, Numbers, Row, measured_answer, numbers_of, row
from paceline.records import Record, join_key
from paceline.records.kinds import LINK_SHAPE, MEASURED_RATES, PREDICTS
from paceline.records.links import describe_link, find_link
from paceline.reports.comparison import compare
from paceline.reports.fields import case_number, strategy_text
from paceline.reports.record_sets import (
    EXPOSED,
    OVER,
    STRATEGIES,
    RecordSet,
    comparable_groups,
    exposed_seconds,
    has_peers,
    includes,
    of_strategies,
    step_seconds,
    strategy_groups,
    strategy_ratio,
    varies,
)
from paceline.reports.tables.predictions import with_predictions
from paceline.reports.tables.table import records_table

BASELINE: StrategyName = "torch_ddp"
SHARDED: StrategyName = "zero1"
_FITTED = ("device", "hardware", "num_hosts", "backend", "dtype", *LINK_SHAPE)
"""Case fields that a fit shares with the records it was fitted to."""
_CLOSE = 0.1
"""Relative error up to which a prediction of exposed communication counts as close."""


def all_reduce(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the throughput of all-reduce by message size and number of ranks."""
    found = [each for each in record_set.find("comm", operation="all_reduce") if has_peers(each)]
    over = ("size_bytes", "world_size", "threads")
    for group in comparable_groups(found, over, holds=varies("size_bytes")):
        ordered = sorted(group, key=lambda each: (*_ranks_and_threads(each), _size(each)))
        ranks = {_ranks_and_threads(record) for record in group}
        fields = {field: group[0].case.get(field) for field in _FITTED}
        fits = [
            record
            for record in record_set.find("collective_fit", operation="all_reduce", **fields)
            if record.metrics and _ranks_and_threads(record) in ranks
        ]
        tables = [records_table(each) for each in (ordered, fits) if each]
        yield measured_answer(ordered, _all_reduce_rows(ordered), ["communication"], tables)


def _all_reduce_rows(ordered: Sequence[Record]) -> Iterator[Row]:
    """Yields the largest message of every number of ranks and threads."""
    largest = {_ranks_and_threads(record): record for record in ordered if record.metrics}
    for record in largest.values():
        yield row(
            "all_reduce",
            numbers_of(record),
            _link_numbers(record, _size(record), record.metrics["time_s"].value),
            size=format_decimal(_size(record), "B"),
            num_processors=record.environment.num_processors,
        )


def _ranks_and_threads(record: Record) -> tuple[float, float]:
    return case_number(record, "world_size"), case_number(record, "threads")


def _size(record: Record) -> float:
    return case_number(record, "size_bytes")


def _link_numbers(record: Record, num_bytes: float, seconds: float) -> Numbers:
    """Returns the bus bandwidth of all-reducing `num_bytes` in `seconds` beside the link's rate.

    Loopback has no rate: its bandwidth is that of copying and adding.
    """
    factor = float(bus_factor("all_reduce", case_number(record, "world_size")))
    bus = factor * num_bytes / seconds if seconds > 0 else None
    link = find_link(record.case)
    return {
        "bus_bytes_per_s": bus,
        "link": describe_link(record.case),
        "link_bytes_per_s": link and link.bytes_per_s,
        "link_share": bus / link.bytes_per_s if bus and link else None,
    }


def exposed_communication(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the cost of one all-reduce per parameter."""
    for group in strategy_groups(record_set, "naive"):
        shown = of_strategies(group, "none", "naive")
        (record,) = of_strategies(group, "naive")
        exposed_s, gradient_bytes = exposed_seconds(record), record.metrics["gradient_bytes"].value
        numbers = row(
            "exposed_communication",
            numbers_of(record),
            _link_numbers(record, gradient_bytes, exposed_s),
            exposed_share=exposed_s / step_seconds(record),
        )
        yield measured_answer(shown, [numbers], ["strategies"])


def flat_step(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the gain of one all-reduce for all gradients over one per parameter."""
    for group in strategy_groups(record_set, "naive", "flat"):
        shown = several, one = of_strategies(group, "naive", "flat")
        numbers = row(
            "flat_step",
            numbers_of(several, "naive_"),
            ratio=strategy_ratio(one, several),
            exposed_ratio=strategy_ratio(one, several, EXPOSED),
        )
        yield measured_answer(shown, [numbers], ["strategies"])


def best_bucket(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the gain of overlapping communication with backward, per parameter and per bucket."""
    for group in strategy_groups(record_set, "ddp"):
        shown = of_strategies(group, *STRATEGIES)
        predictions = _predictions(record_set, group[0])
        sizes = {record.case["bucket_size_mb"] for record in shown} - {None, "auto"}
        plots = {"strategies": shown}
        if len(sizes) > 1:
            plots["bucket-size"] = [*shown, *predictions]
        yield measured_answer(shown, _overlap_rows(shown, predictions), plots)


def _predictions(record_set: RecordSet, step: Record) -> list[Record]:
    """Returns predictions for the same step with any strategy and bucket size."""
    return [
        record
        for record in record_set.predictions("ddp")
        if EXPOSED in record.metrics
        and all(
            value == step.case.get(field)
            for field, value in record.case.items()
            if field not in (*OVER, PREDICTS, *MEASURED_RATES)
        )
    ]


def _overlap_rows(records: Sequence[Record], predictions: Sequence[Record]) -> Iterator[Row]:
    """Yields the fastest bucket size beside all others, and the worst of their predictions."""
    buckets = of_strategies(records, "ddp")
    best = min(buckets, key=step_seconds)
    others = [each for each in records if each is not best and each.case["strategy"] != "none"]
    rival = min(others, key=step_seconds, default=None)
    ratio = None if rival is None else strategy_ratio(best, rival)
    rivals = numbers_of(rival, "rival_")
    yield row("best_bucket", numbers_of(best), rivals, ratio=ratio, num_sizes=len(buckets))
    predicted = {join_key(record): exposed_seconds(record) for record in predictions}
    known = [record for record in buckets if join_key(record) in predicted]
    errors = [abs(predicted[join_key(each)] - exposed_seconds(each)) for each in known]
    judged = list(zip(errors, known, strict=True))
    for worst_s, worst in sorted(judged, key=lambda pair: pair[0])[-1:]:
        yield row(
            "prediction_error",
            numbers_of(worst),
            num_sizes=len(known),
            num_close=sum(error <= _CLOSE * exposed_seconds(each) for error, each in judged),
            close_share=_CLOSE,
            predicted_s=predicted[join_key(worst)],
            error_share=worst_s / step_seconds(worst),
        )


def overlap_in_trace(record_set: RecordSet) -> Iterator[Answer]:
    """Yields timelines of one step of each strategy on a common time axis."""
    found = [record for record in record_set.find("timeline") if has_peers(record)]
    for group in comparable_groups(found, (*OVER, "rank")):
        measured = [record for record in group if record.metrics]
        # On other ranks, messages appear longer: they include the wait for the slowest rank.
        by_wait = sorted(measured, key=exposed_seconds, reverse=True)
        waits_least = {strategy_text(record): record for record in by_wait}.values()
        drawn = [*measured, *record_set.predictions_for("timeline", measured)]
        known = [each for each in waits_least if "overlapped_communication_s" in each.metrics]
        rows = [_trace_row(record) for record in known]
        yield measured_answer(measured, rows, {"timelines": drawn})


def _trace_row(record: Record) -> Row:
    overlapped_s = record.metrics["overlapped_communication_s"].value
    total_s = overlapped_s + exposed_seconds(record)
    share = overlapped_s / total_s if total_s else 0.0
    return row("overlap_in_trace", numbers_of(record), total_s=total_s, overlapped_share=share)


def sharded_memory(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the memory of each way to shard at each instant."""
    found = record_set.find("optimizer")
    for group in comparable_groups(found, OVER, holds=includes("strategy", BASELINE)):
        predictions = record_set.predictions_for("optimizer", group)
        joined = with_predictions(group, predictions)
        measured = [record for record in joined if record.metrics]
        baseline = _find_baseline(measured)
        sharded = [record for record in measured if record is not baseline]
        rows = [_memory_row(record, baseline) for record in sharded or measured]
        tables = [records_table(joined), records_table(joined, "memory")]
        drawn = {"optimizer-memory": [*measured, *predictions]}
        yield measured_answer(group, rows, drawn, tables)


def _memory_row(record: Record, baseline: Record) -> Row:
    peak, before = (each.metrics["peak_before_step_bytes"].value for each in (record, baseline))
    return row(
        "sharded_memory",
        numbers_of(record),
        numbers_of(baseline, "unsharded_"),
        peak_share=peak / before,
    )


def _find_baseline(records: Sequence[Record]) -> Record:
    return next(record for record in records if record.case["strategy"] == BASELINE)


def step_against_unsharded(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the effect of sharding on step time."""
    found = [each for each in record_set.find("optimizer") if each.metrics and has_peers(each)]
    for group in comparable_groups(found, OVER, holds=includes("strategy", BASELINE, SHARDED)):
        baseline = _find_baseline(group)
        rows = [_time_row(record, baseline) for record in group if record is not baseline]
        yield measured_answer(group, rows)


def _time_row(record: Record, baseline: Record) -> Row:
    after, before = record.metrics, baseline.metrics
    return row(
        "step_against_unsharded",
        numbers_of(record),
        step_ratio=compare(after["step_time_s"], before["step_time_s"]),
        optimizer_ratio=compare(after["optimizer_time_s"], before["optimizer_time_s"]),
    )
