"""Measures the overhead of `apply_layout` over the same layout built with plain torch calls.

    python scripts/layout_overhead.py results/layout-overhead.jsonl

Four ranks on loopback train one model twice under tensor 2 with shard 2 (ZeRO-3): once laid out by
Paceline, and once by the plain calls that torch's documentation shows. Steps alternate, and so does
their order. Appends one `comparison` record to the store.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from paceline.benchmarks.harness.measure import ratio_metric
from paceline.benchmarks.harness.records import measured
from paceline.core.plan import ParallelLayout
from paceline.core.presets import model_preset
from paceline.models import TransformerLM
from paceline.parallel import RankPool
from paceline.parallel.mesh.apply import apply_layout
from paceline.parallel.mesh.groups import MeshGroups, describe
from paceline.parallel.mesh.tensor import summed_loss, vocabulary_parallel
from paceline.parallel.ranks.hardware import describe_hardware
from paceline.records import RecordStore
from paceline.records.environment import threads_per_rank

LAYOUT = ParallelLayout(shard=2, tensor=2, sharding="parameters", sequence_parallel=True)
MODEL = "bytes-6M"
SEQUENCES, CONTEXT = 4, 128
WARMUP = 3


def by_hand(model: TransformerLM) -> None:
    """Lays the model out with plain torch calls."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for block in model.blocks:
        parallelize_module(
            block,
            mesh["tensor"],
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None),
                    desired_input_layouts=(Replicate(), None, None),
                ),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.output": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.gate": ColwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    parallelize_module(
        model,
        mesh["tensor"],
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "final_norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        },
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def our_step(model: nn.Module, tokens: Tensor, targets: Tensor) -> None:
    """Computes gradients as the trainer does."""
    with vocabulary_parallel(True):
        summed_loss(model(tokens), targets).backward()


def bare_step(model: nn.Module, tokens: Tensor, targets: Tensor) -> None:
    """Computes gradients with plain torch calls."""
    with loss_parallel():
        logits = model(tokens).flatten(0, 1).float()
        F.cross_entropy(logits, targets.flatten(), reduction="sum").backward()


def both_ways(rank: int, world_size: int, rounds: int) -> list[list[float]]:
    """Returns the seconds of each step, with Paceline and with plain torch."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(TransformerLM(model_preset(MODEL)))
    apply_layout(models[0], MeshGroups(LAYOUT, rank, world_size, torch.device("cpu")))
    by_hand(models[1])
    generator = torch.Generator().manual_seed(rank // LAYOUT.tensor)
    tokens = torch.randint(256, (SEQUENCES, CONTEXT + 1), generator=generator)
    steps = (our_step, bare_step)
    seconds: list[list[float]] = [[], []]
    for number in range(-WARMUP, rounds):
        for way in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            began = time.perf_counter()
            steps[way](models[way], tokens[:, :-1], tokens[:, 1:])
            dist.barrier()
            if number >= 0:
                seconds[way].append(time.perf_counter() - began)
            models[way].zero_grad()
    return seconds


def main() -> int:
    """Measures, prints and records the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    with RankPool(LAYOUT.world_size, timeout_s=300) as pool:
        ours, bare = pool.run(both_ways, arguments.rounds)[0]
    ratio = ratio_metric(ours, bare)
    print(
        f"{describe(LAYOUT)}: {statistics.median(ours):.4f} s a step, by hand "
        f"{statistics.median(bare):.4f} s; ratio {ratio.value:.3f} ({ratio.low:.3f} to "
        f"{ratio.high:.3f})"
    )
    case = {
        "subject": "apply_layout",
        "baseline": "torch by hand",
        "model": MODEL,
        "world_size": LAYOUT.world_size,
        **describe_hardware(torch.device("cpu")).as_case(),
        "threads": threads_per_rank(LAYOUT.world_size),
        "batch": SEQUENCES,
        "context": CONTEXT,
        "warmup": WARMUP,
        "rounds": arguments.rounds,
    }
    numbers = {"time_ratio": ratio, "time_s": ours, "baseline_time_s": bare}
    RecordStore(arguments.store).append(measured("comparison", case, numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
