"""Measures one rank of 1,024 under layouts of a 70B model: its parameter bytes and setup time.

    python scripts/layout_scale.py --store results/layout-scale.jsonl

torch's fake process group makes this process the first rank of many and then the last, which cover
the first and the last stage; nothing is sent. The model is on the meta device, which has shapes but
no values. The trainer's own code builds the mesh, stages, DTensors and shards. The bytes of the
rank's parameters are compared with those that the planner predicts for the fullest stage. With
--store, appends one `construction` record per layout and rank.
"""

import argparse
import dataclasses
import gc
import pathlib
import resource
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.accounting.parameters import count_parameters
from paceline.benchmarks.harness.records import measured, resolve_device
from paceline.core.plan import ParallelLayout
from paceline.core.presets import model_preset
from paceline.core.runnable import Work, require_runnable
from paceline.core.specs import Precision
from paceline.models import TransformerLM
from paceline.parallel.buckets import local_tensor
from paceline.parallel.mesh.apply import apply_layout
from paceline.parallel.mesh.groups import MeshGroups, describe
from paceline.parallel.ranks.hardware import describe_hardware
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory import layout_state_bytes
from paceline.records import RecordStore
from paceline.training.parallelize import own_stages

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=pathlib.Path, default=None)
    arguments = parser.parse_args()
    work = Work(shape=model_preset(MODEL), context_length=CONTEXT_LENGTH)
    num_parameters = count_parameters(work.shape).total
    for layout in LAYOUTS:
        require_runnable(layout, work, "layout")
        planned = planned_bytes(layout)
        found = []
        for rank in sorted({0, layout.world_size - 1}):
            world_size = layout.world_size
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
            began = time.perf_counter()
            part = lay_out(layout, rank)
            seconds = time.perf_counter() - began
            held = parameter_bytes(part)
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
                    "world_size": world_size,
                    **describe_hardware(resolve_device("cpu")).as_case(),
                }
                numbers: dict[str, float | list[float]] = {
                    "time_s": [seconds],
                    "tensor_bytes": float(held),
                    "planned_bytes": planned,
                    "process_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                }
                RecordStore(arguments.store).append(measured("construction", case, numbers))
            del part
            gc.collect()
            dist.destroy_process_group()
        ratio = max(found) / planned
        print(f"    the planner says {planned:,.0f}; {ratio:.5f} of that", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(f"peak of this process: {peak:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
