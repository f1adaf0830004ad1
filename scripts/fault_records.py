"""Records of faults that were tried: how many, and how many of them lost something."""

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
    """Appends one kind of fault to a store, and says so.

    Args:
        store: A file of records.
        subject: What the fault was done to.
        fault: What was done.
        num_tried: How often.
        num_lost: How often that lost a step, a sample or a checkpoint, or left something behind.
        case: What else there is to say of the setup.
        metrics: What else was measured.
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
