"""Measures the overhead of `apply_layout` over the same layout built with plain torch calls.

    python -m studies.parallel.layout_overhead results/layout-overhead.jsonl

Four ranks on loopback train one model twice under tensor 2 with shard 2 (ZeRO-3): once laid out by
Paceline, and once by the plain calls that torch's documentation shows. Steps alternate, and so does
their order. Appends one `comparison` record to the store.
"""

import functools
import sys
import time
from collections.abc import Callable

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

from paceline.core.plan import ParallelLayout
from paceline.core.presets import model_preset
from paceline.models import TransformerLM
from paceline.parallel import RankPool
from paceline.parallel.mesh.layout import MeshGroups, apply_layout
from paceline.parallel.mesh.tensor import summed_loss, vocabulary_parallel
from studies.harness.records import machine_case, record_comparison
from studies.harness.study import study_parser
from studies.harness.turns import interleaved

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


Step = Callable[[nn.Module, Tensor, Tensor], None]


def both_ways(rank: int, world_size: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each step, with Paceline and with plain torch."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(TransformerLM(model_preset(MODEL)))
    apply_layout(models[0], MeshGroups(LAYOUT, rank, world_size, torch.device("cpu")))
    by_hand(models[1])
    generator = torch.Generator().manual_seed(rank // LAYOUT.tensor)
    tokens = torch.randint(256, (SEQUENCES, CONTEXT + 1), generator=generator)

    def take_turn(run: Step, model: nn.Module) -> float:
        dist.barrier()
        began = time.perf_counter()
        run(model, tokens[:, :-1], tokens[:, 1:])
        dist.barrier()
        seconds = time.perf_counter() - began
        model.zero_grad()
        return seconds

    ways = {
        "ours": functools.partial(take_turn, our_step, models[0]),
        "bare": functools.partial(take_turn, bare_step, models[1]),
    }
    return interleaved(ways, rounds, warmup=WARMUP)


def main() -> int:
    """Measures, prints and records the ratio."""
    parser = study_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    with RankPool(LAYOUT.world_size, timeout_s=300) as pool:
        seconds = pool.run(both_ways, arguments.rounds)[0]
    case = {
        "subject": "apply_layout",
        "baseline": "torch by hand",
        "model": MODEL,
        "world_size": LAYOUT.world_size,
        **machine_case(LAYOUT.world_size),
        "batch": SEQUENCES,
        "context": CONTEXT,
        "warmup": WARMUP,
    }
    record_comparison(arguments.store, case, seconds["ours"], seconds["bare"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
