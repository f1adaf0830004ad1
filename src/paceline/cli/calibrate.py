"""``paceline calibrate``: measures the parts of a training step on this machine."""

import dataclasses

from paceline.benchmarks.config import CalibrationSweep
from paceline.cli.output import (
    DEFAULT_STORE,
    AppendedStore,
    Flat,
    OutputOptions,
    case_progress,
    keep_records,
    print_tables,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateCommand:
    """Measure this machine for a minute, so that training steps can be predicted."""

    sweep: Flat[CalibrationSweep]
    store: AppendedStore = DEFAULT_STORE
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Measures, appends to the store, and prints."""
        from paceline.benchmarks.calibration import calibration_records

        with case_progress(1) as progress:
            made = calibration_records(self.sweep, progress.step)
            records = list(keep_records(made, self.store, self.output))
        print_tables(records, self.output)
        return 0
