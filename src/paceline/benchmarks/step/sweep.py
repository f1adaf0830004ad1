"""Training steps from cases to records."""

from collections.abc import Iterator

from paceline.accounting import minimum_step_bytes
from paceline.benchmarks.harness.isolated_sweep import Subject, isolated_records
from paceline.benchmarks.harness.measure import Progress
from paceline.benchmarks.step.config import StepSweep
from paceline.benchmarks.step.training_step import measure_step, step_case_fields
from paceline.core.specs import precision_preset
from paceline.records import Record

_SUBJECT = Subject(
    kind="step",
    measure=measure_step,
    case_fields=step_case_fields,
    minimum_bytes=lambda case: minimum_step_bytes(
        case.shape, case.batch, precision_preset(case.precision), case.phase
    ),
)


def step_records(sweep: StepSweep, on_progress: Progress) -> Iterator[Record]:
    """Measures every case of the sweep."""
    return isolated_records(_SUBJECT, sweep.cases(), sweep.limits, on_progress)
