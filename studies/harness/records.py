"""Records of studies: measurements on this machine, comparisons of two ways, injected faults.

torch is imported only to write a record: some studies measure the half of Paceline that works
without it, in processes that import this file.
"""

import os
import statistics
from collections.abc import Mapping, Sequence

from paceline.core.host import threads_per_rank
from paceline.records import CaseValue, Metric, RecordStore

Store = str | os.PathLike[str]
Numbers = Mapping[str, Metric | float | Sequence[float]]


def machine_case(num_ranks: int | None = None) -> dict[str, CaseValue]:
    """Returns the fields of a case that describe this machine.

    Args:
        num_ranks: Number of ranks that share the cores. None for this process alone.
    """
    import torch

    from paceline.devices.hardware import describe_hardware

    fields = describe_hardware(torch.device("cpu")).as_case()
    return fields if num_ranks is None else {**fields, "threads": threads_per_rank(num_ranks)}


def append_record(store: Store, kind: str, case: Mapping[str, CaseValue], numbers: Numbers) -> None:
    """Appends a record of a case that was measured or computed on this machine."""
    from paceline.benchmarks.harness.measure import measured

    RecordStore(store).append(measured(kind, case, numbers))


def record_comparison(
    store: Store,
    case: Mapping[str, CaseValue],
    subject_s: Sequence[float],
    baseline_s: Sequence[float],
    more: Numbers | None = None,
) -> None:
    """Appends a `comparison` record of the seconds of two ways in the same rounds, and prints it.

    Args:
        store: A file of records.
        case: Names of the subject and its baseline, and the setup, machine included.
        subject_s: Seconds of the subject, one per round.
        baseline_s: Seconds of the baseline.
        more: Further measurements.
    """
    from paceline.benchmarks.harness.measure import ratio_metric

    ratio = ratio_metric(subject_s, baseline_s)
    times: Numbers = {"time_ratio": ratio, "time_s": subject_s, "baseline_time_s": baseline_s}
    append_record(
        store, "comparison", {**case, "rounds": len(subject_s)}, {**times, **(more or {})}
    )
    print(
        f"{case['subject']}: {statistics.median(subject_s):.4g} s, {case['baseline']}: "
        f"{statistics.median(baseline_s):.4g} s, ratio {ratio.value:.4f} "
        f"(95% {ratio.low:.4f} to {ratio.high:.4f})",
        flush=True,
    )


class FaultRecords:
    """Appends a `fault` record for every kind of injected fault, and counts what was lost.

    Args:
        store: A file of records.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.num_lost = 0

    @property
    def exit_code(self) -> int:
        """1 if anything was lost."""
        return int(self.num_lost > 0)

    def add(
        self,
        subject: str,
        fault: str,
        num_tried: int,
        lost: int | Sequence[str],
        *,
        case: Mapping[str, CaseValue] | None = None,
        metrics: Numbers | None = None,
    ) -> None:
        """Records one kind of fault, and prints a summary.

        Args:
            subject: Target of the fault.
            fault: Kind of fault.
            num_tried: Number of trials.
            lost: Trials that lost a step, a sample or a checkpoint, or left something behind: their
                number, or a description of each, which is printed.
            case: Further properties of the setup.
            metrics: Further measurements.
        """
        problems = () if isinstance(lost, int) else lost
        num_lost = lost if isinstance(lost, int) else len(lost)
        for problem in problems:
            print(f"lost: {problem}")
        whole_case = {"subject": subject, "fault": fault, **(case or {}), **machine_case()}
        counts = {
            "num_tried": num_tried,
            "num_survived": num_tried - num_lost,
            "num_lost": num_lost,
        }
        append_record(self._store, "fault", whole_case, {**counts, **(metrics or {})})
        print(f"{subject}, {fault}: {num_tried} tried, {num_lost} lost", flush=True)
        self.num_lost += num_lost
