"""Attention from cases to records."""

from collections.abc import Iterator

from paceline.accounting import minimum_attention_bytes
from paceline.benchmarks.attention.config import AttentionSweep
from paceline.benchmarks.attention.measure import (
    attention_case_fields,
    attention_obstacle,
    measure_attention,
)
from paceline.benchmarks.harness.isolated_sweep import Subject, isolated_records
from paceline.benchmarks.harness.measure import Progress
from paceline.core.specs import bytes_per_element
from paceline.records import Record

_SUBJECT = Subject(
    kind="attention",
    measure=measure_attention,
    case_fields=attention_case_fields,
    minimum_bytes=lambda case: minimum_attention_bytes(
        case.implementation,
        case.batch,
        case.head_dim,
        bytes_per_element(case.dtype),
        compiled=case.compiled,
    ),
    obstacle=attention_obstacle,
)


def attention_records(sweep: AttentionSweep, on_progress: Progress) -> Iterator[Record]:
    """Measures every case of the sweep."""
    return isolated_records(_SUBJECT, sweep.cases(), sweep.limits, on_progress)
