"""Records of injected faults: how many were tried, and how many lost something."""

import os
from collections.abc import Mapping, Sequence

import torch

from paceline.benchmarks.harness.records import measured
from paceline.parallel.ranks.hardware import describe_hardware
from paceline.records import CaseValue, RecordStore


def record_fault(
    store: str | os.PathLike[str],
    *,
    subject: str,
    fault: str,
    num_tried: int,
    num_lost: int,
    case: Mapping[str, CaseValue] | None = None,
    metrics: Mapping[str, float | Sequence[float]] | None = None,
) -> None:
    """Appends a `fault` record for one kind of fault to a store, and prints a summary.

    Args:
        store: A file of records.
        subject: Target of the fault.
        fault: Kind of fault.
        num_tried: Number of trials.
        num_lost: Trials that lost a step, a sample or a checkpoint, or left something behind.
        case: Further properties of the setup.
        metrics: Further measurements.
    """
    whole_case = {
        "subject": subject,
        "fault": fault,
        **(case or {}),
        **describe_hardware(torch.device("cpu")).as_case(),
    }
    numbers = {
        "num_tried": num_tried,
        "num_survived": num_tried - num_lost,
        "num_lost": num_lost,
        **(metrics or {}),
    }
    RecordStore(store).append(measured("fault", whole_case, numbers))
    print(f"{subject}, {fault}: {num_tried} tried, {num_lost} lost", flush=True)
