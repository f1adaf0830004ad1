"""Reproduces faults of torch 2.13 that affect layouts, in one process on a CPU.

    python -m studies.parallel.torch_faults

Prints the error of each fault, or that it works; writes no record. Paceline's workarounds are in
docs/beyond-data-parallelism.md; once torch has fixed a fault, its entry there can be removed.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module

from studies.harness.runs import fake_rank
from studies.harness.study import study_parser


def context_parallel_attention(mesh: DeviceMesh) -> str:
    """Runs attention inside torch's context parallelism."""
    query, key, value = (torch.randn(1, 2, 8, 16) for _ in range(3))
    buffers = [query, key, value]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return "works"


def zero_bubble_with_fsdp2(mesh: DeviceMesh) -> str:
    """Runs the zero-bubble schedule on modules that FSDP2 reshards after forward."""
    stages = []
    for number in range(2):
        module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        for layer in module:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        stages.append(PipelineStage(module, number, 2, torch.device("cpu")))
    schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=F.mse_loss)
    schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
    named = [pair for stage in stages for pair in stage.submod.named_parameters()]
    missing = [name for name, parameter in named if parameter.grad is None]
    return f"{len(missing)} of {len(named)} parameters have no gradient" if missing else "works"


def loss_parallel_after_an_error(mesh: DeviceMesh) -> str:
    """Computes a loss of replicated logits after an error inside `loss_parallel`."""
    try:
        with loss_parallel():
            raise ArithmeticError
    except ArithmeticError:
        pass
    logits, targets = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
    try:
        F.cross_entropy(
            *(distribute_tensor(each, mesh, [Replicate()]) for each in (logits, targets))
        )
    finally:
        with loss_parallel():  # A normal exit switches it off.
            pass
    return "works"


class _Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def compiled_block_behind_a_split_embedding(mesh: DeviceMesh) -> str:
    """Runs backward through a compiled block after an embedding split over two tensor ranks."""
    embedding, block = nn.Embedding(8, 8), _Residual(8, 8)
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(embedding, mesh, rows)
    block.compile(backend="aot_eager")
    block(embedding(torch.zeros(2, 4, dtype=torch.int64))).sum().backward()
    return "works"


FAULTS = {
    context_parallel_attention: 1,
    zero_bubble_with_fsdp2: 1,
    loss_parallel_after_an_error: 1,
    compiled_block_behind_a_split_embedding: 2,
}
"""World size of each fault; torch's fake process group makes this process rank 0."""


def main() -> int:
    """Tries every fault and prints the result."""
    study_parser(__doc__, store=None).parse_args()
    for fault, world_size in FAULTS.items():
        with fake_rank(world_size):
            try:
                found = fault(init_device_mesh("cpu", (world_size,)))
            except Exception as error:
                found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        print(f"{fault.__name__}: {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
