"""Measures one rank of 1,024 under layouts of a 70B model: its parameter bytes and setup time.

    python -m studies.parallel.layout_scale --store results/layout-scale.jsonl

torch's fake process group makes this process the first rank of many and then the last, which cover
the first and the last stage; nothing is sent. The model is on the meta device, which has shapes but
no values. The trainer's own code builds the mesh, stages, DTensors and shards. The bytes of the
rank's parameters are compared with those that the planner predicts for the fullest stage. With
--store, appends one `construction` record per layout and rank.
"""

import dataclasses
import gc
import sys
import time

import numpy as np
import torch
from torch import nn

from paceline.accounting.counts import count_parameters
from paceline.core.plan import ParallelLayout
from paceline.core.presets import model_preset
from paceline.core.runnable import Work, require_runnable
from paceline.core.specs import Precision
from paceline.core.units import GIB
from paceline.models import TransformerLM
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.mesh.layout import MeshGroups, apply_layout, describe
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory import layout_state_bytes
from paceline.training.parallelize import own_stages
from studies.harness.records import append_record, machine_case
from studies.harness.runs import fake_rank
from studies.harness.study import resident_peak_bytes, study_parser

MODEL = "llama3-70B"
CONTEXT_LENGTH = 8192
LAYOUTS = (
    ParallelLayout(shard=64, pipeline=2, tensor=8, sharding="parameters", sequence_parallel=True),
    ParallelLayout(shard=128, tensor=8, sharding="parameters", sequence_parallel=True),
    ParallelLayout(replicate=16, shard=8, tensor=8, sharding="parameters", sequence_parallel=True),
    ParallelLayout(shard=32, context=4, tensor=8, sharding="parameters", sequence_parallel=True),
)


def lay_out(layout: ParallelLayout, rank: int) -> nn.Module:
    """Returns a rank's part of the model."""
    with torch.device("meta"):
        model = TransformerLM(model_preset(MODEL), activation_checkpointing="full")
    groups = MeshGroups(layout, rank, layout.world_size, torch.device("cpu"))
    part: nn.Module = model
    if layout.pipeline > 1:
        (part,) = own_stages(model, groups, CONTEXT_LENGTH).values()
    apply_layout(part, groups)
    return part


def parameter_bytes(part: nn.Module) -> int:
    """Returns the bytes of a rank's parameters."""
    local = [local_tensor(parameter) for parameter in part.parameters()]
    return sum(each.numel() * each.element_size() for each in local)


def planned_bytes(layout: ParallelLayout) -> float:
    """Returns the planner's bytes of parameters on the fullest stage."""
    workload = Workload(
        shape=model_preset(MODEL),
        precision=Precision(),
        context_length=CONTEXT_LENGTH,
        micro_batch=np.array([1]),
        num_micro_batches=np.array([16]),
        trainer_stages=True,
    )
    layouts = dataclasses.replace(Layouts.of([layout]), shards_context=True)  # As FSDP2 does.
    return float(np.ravel(layout_state_bytes(layouts, workload).parameters)[0])


def main() -> int:
    """Lays the model out under every layout, as the first rank and as the last."""
    arguments = study_parser(__doc__, "--store").parse_args()
    work = Work(shape=model_preset(MODEL), context_length=CONTEXT_LENGTH)
    num_parameters = count_parameters(work.shape).total
    for layout in LAYOUTS:
        require_runnable(layout, work, "layout")
        planned = planned_bytes(layout)
        found = []
        for rank in sorted({0, layout.world_size - 1}):
            with fake_rank(layout.world_size, rank):
                began = time.perf_counter()
                part = lay_out(layout, rank)
                seconds = time.perf_counter() - began
                held = parameter_bytes(part)
                del part
                gc.collect()
            found.append(held)
            print(
                f"{describe(layout)}, {layout.sharding}: rank {rank} holds {held:,} bytes of "
                f"parameters, laid out in {seconds:.1f} s",
                flush=True,
            )
            if arguments.store is not None:
                case = {
                    "subject": f"{describe(layout)}, rank {rank}",
                    "parameters": num_parameters,
                    "world_size": layout.world_size,
                    **machine_case(),
                }
                numbers = {
                    "time_s": [seconds],
                    "tensor_bytes": held,
                    "planned_bytes": planned,
                    "process_bytes": resident_peak_bytes(),
                }
                append_record(arguments.store, "construction", case, numbers)
        ratio = max(found) / planned
        print(f"    the planner says {planned:,.0f}; {ratio:.5f} of that", flush=True)
    print(f"peak of this process: {resident_peak_bytes() / GIB:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
