"""Trains a Transformer for one step with tensor parallelism and sharded parameters (ZeRO-3).

    python examples/layout.py --ranks 4
    torchrun --nproc-per-node 4 examples/layout.py

Ranks of one tensor group read the same sequences; the loss is that of the whole batch.
"""

import argparse

import torch
import torch.distributed as dist

from paceline.core.plan import ParallelLayout
from paceline.core.presets import model_preset
from paceline.models import TransformerLM
from paceline.parallel import distributed_session
from paceline.parallel.mesh.layout import MeshGroups, apply_layout, clip_grad_norm
from paceline.parallel.mesh.tensor import summed_loss, vocabulary_parallel

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=None, help="ranks to start where none are")
arguments = parser.parse_args()

with distributed_session(ranks_per_host=arguments.ranks, timeout_s=60) as session:
    layout = ParallelLayout(
        tensor=2, shard=session.world_size // 2, sharding="parameters", sequence_parallel=True
    )
    groups = MeshGroups(layout, session.rank, session.world_size, session.device)
    torch.manual_seed(0)  # Same weights on all ranks; each rank keeps its part.
    model = TransformerLM(model_preset("bytes-6M")).to(session.device)
    apply_layout(model, groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + groups.data_rank)
    tokens = torch.randint(256, (2, 65), device=session.device)
    with vocabulary_parallel(groups.tensor is not None):
        loss = summed_loss(model(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()
        torch.autograd.backward(loss)
    norm = clip_grad_norm(model, groups, max_norm=1.0)
    optimizer.step()

    mean = loss.detach() / session.world_size
    dist.all_reduce(mean)
    if session.rank == 0:
        print(f"loss {mean.item():.4f}, gradient norm {norm.item():.4f}")
