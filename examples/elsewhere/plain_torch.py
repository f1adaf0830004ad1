"""A plain torch loop on several ranks; Paceline adds the lines marked with a plus.

python examples/elsewhere/plain_torch.py --ranks 2
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

from paceline.parallel import BucketedDataParallel, distributed_session  # +

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=None, help="ranks to start where none are")
arguments = parser.parse_args()

# --8<-- [start:loop]
with distributed_session(ranks_per_host=arguments.ranks, timeout_s=60) as session:  # +
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(session.device)
    model = BucketedDataParallel(model)  # +
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        inputs = torch.randn(32, 16, generator=generator)
        targets = inputs.sin().sum(dim=1, keepdim=True)
        own = slice(session.rank, None, session.world_size)  # +
        loss = nn.functional.mse_loss(model(inputs[own]), targets[own])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # --8<-- [end:loop]
        dist.all_reduce(loss.detach_().div_(session.world_size))
        if session.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
