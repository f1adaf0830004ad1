"""A typical training loop with gradient accumulation, weighted ranks and clipping.

No explicit wait for communication is needed: gradients are averaged when backward returns, and
passes inside no_sync() stay local until the next one outside. The same global batches are divided
among any number of ranks. Each rank is weighted by its number of sequences, so that the printed
losses do not depend on the division.

    python examples/accumulate_and_clip.py --ranks 2
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn

from paceline.core import ModelShape
from paceline.models import TransformerLM, next_token_loss
from paceline.parallel import BucketedDataParallel, distributed_session

STEPS, ACCUMULATION, GLOBAL_BATCH, CONTEXT = 5, 2, 8, 32
SHAPE = ModelShape(vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=2)

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=None, help="ranks to start where none are")
arguments = parser.parse_args()

# --8<-- [start:loop]
with distributed_session(ranks_per_host=arguments.ranks, timeout_s=60) as session:
    torch.manual_seed(0)
    model = BucketedDataParallel(TransformerLM(SHAPE).to(session.device), bucket_size_mb="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        losses = []
        for micro in range(ACCUMULATION):
            batch = torch.randint(64, (GLOBAL_BATCH, CONTEXT + 1), generator=generator)
            own = batch[session.rank :: session.world_size].to(session.device)
            weight = len(own) / GLOBAL_BATCH
            is_last = micro == ACCUMULATION - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                if is_last:
                    model.set_gradient_weight(len(own))
                loss = next_token_loss(model(own[:, :-1]), own[:, 1:]) / ACCUMULATION
                loss.backward()
            losses.append(loss.detach() * weight)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        # --8<-- [end:loop]
        mean_loss = torch.stack(losses).sum()
        dist.all_reduce(mean_loss)
        if session.rank == 0:
            print(f"step {step}: loss {mean_loss.item():.4f}")
