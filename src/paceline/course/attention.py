"""Answers from attention benchmarks: growth with length, implementations, Triton kernels."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from paceline.accounting import attention_saved_bytes
from paceline.core.specs import BatchShape
from paceline.course.answers import (
    Answer,
    Row,
    both_passes,
    compare_passes,
    measured_answer,
    numbers_of,
    pairs_with_base,
    peak_flops,
    row,
)
from paceline.records import Record
from paceline.reports.document import Block
from paceline.reports.fields import case_number, describe_fields, split_fields
from paceline.reports.record_sets import RecordSet, comparable_groups, describe_environments, varies
from paceline.reports.tables.measurements import implementations_table, kernels_table

_SIZES = ("head_dim", "context")


def attention_growth(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the growth in time and memory of attention that stores its scores."""
    found = record_set.find("attention", implementation="naive", compile="none", causal=False)
    found = sorted(found, key=lambda each: [case_number(each, name) for name in _SIZES])
    for group in comparable_groups(found, _SIZES, holds=varies("context")):
        yield measured_answer(group, [_growth(group)], ["attention-time", "attention-memory"])


def _growth(group: Sequence[Record]) -> Row:
    """Returns the growth between the two longest lengths of the head dim with most lengths."""
    by_head_dim: dict[float, list[Record]] = {}
    for record in group:
        if record.metrics:
            by_head_dim.setdefault(case_number(record, "head_dim"), []).append(record)
    lengths = max(by_head_dim.items(), key=lambda item: (len(item[1]), item[0]))[1]
    first, last = lengths[-2:][0], lengths[-1]
    batch, length, head_dim = (
        int(case_number(last, name)) for name in ("batch", "context", "head_dim")
    )
    shape = BatchShape(num_sequences=batch, context_length=length)
    formula = attention_saved_bytes("naive", shape, head_dim, 4, causal=False)
    return row(
        "attention_growth",
        numbers_of(first, "first_"),
        numbers_of(last),
        expected_saved_bytes=formula if last.case["dtype"] == "float32" else None,
        saved_power=_power(first, last, "saved_for_backward_bytes"),
        forward_power=_power(first, last, "forward_time_s"),
    )


def _power(first: Record, last: Record, metric: str) -> float | None:
    """Returns p of growth as length^p; None for one length, or if a value is 0."""
    longer = case_number(last, "context") / case_number(first, "context")
    before, after = (each.metrics[metric].value for each in (first, last))
    return math.log(after / before, longer) if longer > 1 and before and after else None


def compiled_attention(record_set: RecordSet) -> Iterator[Answer]:
    """Yields compiled attention beside plain attention, at the longest length."""
    found = record_set.find("attention", implementation="naive")
    for group in comparable_groups(found, ("compile", *_SIZES), holds=varies("compile")):
        pairs = pairs_with_base(sorted(group, key=_size), "compile", "none", _size)
        rows = [
            row("compiled_attention", numbers_of(record), ratio=compare_passes(record, plain))
            for record, plain in pairs[-1:]
        ]
        yield measured_answer(group, rows, ["attention-time"])


def fastest_attention(record_set: RecordSet) -> Iterator[Answer]:
    """Yields a comparison of attention implementations by length, head dim and dtype."""
    found = record_set.find("attention", compile="none", causal=True)
    over = ("implementation", "dtype", *_SIZES)
    for group in comparable_groups(found, over, holds=varies("implementation")):
        plots = ["attention-time", "attention-memory"]
        table = implementations_table(group)
        yield measured_answer(group, [_implementation_row(group)], plots, [table])


def _implementation_row(group: Sequence[Record]) -> Row:
    """Returns the fastest implementation beside the slowest.

    They are compared at the longest case with most implementations. The naive one, which stores
    its scores and runs out of memory first, is then usually among them.
    """
    cases: dict[tuple[object, ...], list[Record]] = {}
    measured = (record for record in group if record.metrics)
    for record in sorted(measured, key=lambda record: (_size(record), str(record.case["dtype"]))):
        cases.setdefault((_size(record), record.case["dtype"]), []).append(record)
    found = max(reversed(cases.values()), key=len)
    by_time = sorted(found, key=lambda each: both_passes(each).value)
    fastest, slowest = by_time[0], by_time[-1]
    return row(
        "fastest_attention",
        numbers_of(slowest, "slowest_"),
        numbers_of(fastest),
        num_implementations=len(found),
        time_s=both_passes(fastest).value,
        slowest_time_s=both_passes(slowest).value,
        slowest_ratio=compare_passes(slowest, fastest),
        device_flops_per_s=peak_flops(fastest, str(fastest.case["dtype"])),
    )


def _size(record: Record) -> tuple[float, float]:
    return case_number(record, "context"), case_number(record, "head_dim")


def kernel_resources(record_set: RecordSet) -> Iterator[Answer]:
    """Yields the GPU resources that the Triton kernels use, compiled ahead of time."""
    found = record_set.find("kernel")
    measured = [record for record in found if record.metrics]
    if not measured:
        return
    table = kernels_table(found)
    shared, _varying = split_fields(found)
    captions = [text for text in (describe_fields(shared), table.caption) if text]
    block = Block(
        heading="Compiled ahead of time, without a GPU",
        tables=(dataclasses.replace(table, caption=", ".join(captions)),),
        environments=describe_environments(found),
    )
    # Only a kernel with matrix instructions has a ceiling by the peak of the matrix units.
    multiplying = [each for each in measured if each.metrics["matrix_instructions"].value]
    lowest = min(multiplying, key=lambda each: each.metrics["worst_ceiling"].value, default=None)
    resources = row(
        "kernel_resources",
        numbers_of(max(measured, key=lambda record: record.metrics["registers"].value)),
        numbers_of(lowest, "lowest_"),
        num_spilling=sum(record.metrics["spill_bytes"].value > 0 for record in measured),
        num_kernels=len(measured),
        num_multiplying=len(multiplying),
        ceiling_share=None if lowest is None else lowest.metrics["worst_ceiling"].value,
    )
    yield Answer(block, [resources])
