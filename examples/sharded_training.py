"""Trains with sharded gradients and optimizer state (ZeRO-2); saves on two ranks, resumes on three.

Each rank owns an equal shard of every bucket of parameters. The same global batches are divided
among any number of ranks, so that the printed losses depend neither on the number of ranks nor on
whether the run was interrupted:

    python examples/sharded_training.py --ranks 2 --steps 3 --checkpoint checkpoint
    python examples/sharded_training.py --ranks 3 --steps 6 --checkpoint checkpoint
"""

import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from paceline.core import ModelShape
from paceline.models import TransformerLM, next_token_loss
from paceline.parallel import ShardedDataParallel, ShardedOptimizer, distributed_session

GLOBAL_BATCH, CONTEXT = 12, 32
SHAPE = ModelShape(vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=2)

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=None, help="ranks to start where none are")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--checkpoint", type=pathlib.Path, default=None)
arguments = parser.parse_args()
path = arguments.checkpoint

# --8<-- [start:loop]
with distributed_session(ranks_per_host=arguments.ranks, timeout_s=60) as session:
    torch.manual_seed(0)
    model = ShardedDataParallel(TransformerLM(SHAPE).to(session.device))
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    first = 0
    if path is not None and path.exists():
        saved = {"model": model.state_dict(), "step": 0}
        dcp.load(saved, checkpoint_id=path)
        model.load_state_dict(saved["model"])
        optimizer.load_checkpoint(model, dcp.FileSystemReader(path))
        first = saved["step"]
    for step in range(first, arguments.steps):
        batch = torch.randint(
            64, (GLOBAL_BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(step)
        )
        own = batch[session.rank :: session.world_size].to(session.device)
        loss = next_token_loss(model(own[:, :-1]), own[:, 1:])
        loss.backward()  # Overlaps the reduce-scatter of gradients.
        model.clip_grad_norm_(1.0)
        optimizer.step()  # The all-gather of the new parameters overlaps the next forward pass.
        optimizer.zero_grad()
        # --8<-- [end:loop]
        mean_loss = loss.detach() / session.world_size
        dist.all_reduce(mean_loss)
        if session.rank == 0:
            print(f"step {step}: loss {mean_loss.item():.4f}")
    # --8<-- [start:save]
    if path is not None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.checkpoint_state(model),
            "step": arguments.steps,
        }
        dcp.save(state, checkpoint_id=path)
    # --8<-- [end:save]
