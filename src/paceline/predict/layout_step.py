"""Time of a step of Paceline's trainer under a layout, on calibrated ranks.

`paceline.predict.step` simulates the buckets of a data-parallel strategy. This module predicts
what runs on torch's engine instead, tensor, context and pipeline parallelism and FSDP2, with the
closed formulas of `paceline.predict.cost.step_time`. Computing is timed in float32, as it was
calibrated.
"""

import dataclasses

from paceline.core.plan import ParallelLayout
from paceline.core.specs import Precision
from paceline.predict.calibrated_cluster import cluster_of_ranks
from paceline.predict.calibration import Calibration
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.step_time import StepTime, step_time
from paceline.predict.trainer_memory import TrainerStep


def layout_step_time(
    layout: ParallelLayout,
    step: TrainerStep,
    calibration: Calibration,
    inside: Calibration | None = None,
) -> StepTime:
    """Returns the terms of a step, as arrays of one number.

    Args:
        layout: A layout that the trainer supports.
        step: The model and the micro-batches.
        calibration: Calibration of the layout's ranks.
        inside: Calibration of the ranks of one host, if the ranks span several hosts.
    """
    workload = Workload(
        shape=step.shape,
        precision=Precision(),
        context_length=step.context_length,
        micro_batch=step.micro_batch,
        num_micro_batches=step.num_micro_batches,
    )
    # FSDP2 shards over the context-parallel ranks too.
    arrays = dataclasses.replace(Layouts.of([layout]), shards_context=True)
    # On a CPU, FSDP2's collectives block until the data has arrived: nothing is overlapped.
    hidden = 0.0 if calibration.topology["device"] == "cpu" else 1.0
    return step_time(
        arrays, workload, cluster_of_ranks(calibration, workload, inside), hidden=hidden
    )
