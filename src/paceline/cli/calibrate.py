"""``paceline calibrate``: what this machine reaches on the parts of a training step."""

import dataclasses
from typing import TYPE_CHECKING

from paceline.benchmarks.calibrate_config import CalibrationSweep
from paceline.cli.bench import StoreOptions
from paceline.cli.output import OutputOptions, case_progress, print_record, print_tables

if TYPE_CHECKING:
    from paceline.records import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateCommand:
    """Measure in a minute what predictions of a step are made from."""

    sweep: CalibrationSweep
    store: StoreOptions
    output: OutputOptions


def run(command: CalibrateCommand) -> int:
    """Measures, appends to the store, prints."""
    from paceline.benchmarks.calibrate import calibration_records
    from paceline.records import RecordStore

    store = RecordStore(command.store.store)
    records: list[Record] = []
    with case_progress(1) as progress:
        for record in calibration_records(command.sweep, progress.step):
            store.append(record)
            records.append(record)
            if command.output.json:
                print_record(record)
    if not command.output.json:
        print_tables(records)
    return 0
