"""Trains in two sites that average their parameters every ten steps, in 4 bits, while they go on.

Inside a site, ranks shard the model. Between sites, each rank exchanges its shard with the rank of
the same place in the other site. With real sites, start the same program under torchrun, with the
ranks of the first site first.

    python examples/outer_loop.py --site-ranks 2
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from paceline.core import ModelShape
from paceline.models import TransformerLM, next_token_loss
from paceline.parallel import FullyShardedDataParallel, OuterLoop, distributed_session

STEPS, SITES, BATCH, CONTEXT = 24, 2, 8, 32
SHAPE = ModelShape(vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=2)

parser = argparse.ArgumentParser()
parser.add_argument("--site-ranks", type=int, default=1, help="ranks of each site to start")
arguments = parser.parse_args()

# --8<-- [start:loop]
with distributed_session(ranks_per_host=SITES * arguments.site_ranks, timeout_s=60) as session:
    shape = (SITES, session.world_size // SITES)
    mesh = init_device_mesh(session.device.type, shape, mesh_dim_names=("site", "inside"))
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        TransformerLM(SHAPE).to(session.device), process_group=mesh["inside"]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with OuterLoop(
        model,
        optimizer,
        group=mesh["site"],
        inner_group=mesh["inside"],
        every_steps=10,
        fragments=2,
        delay_steps=2,
        compression="int4",
    ) as outer:
        for step in range(STEPS):
            # Each number follows from the one before it, which a model can learn.
            draw = torch.Generator().manual_seed(step * session.world_size + session.rank)
            first = torch.randint(64, (BATCH, 1), generator=draw)
            tokens = ((first + 3 * torch.arange(CONTEXT + 1)) % 64).to(session.device)
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()  # Sends and applies fragments when they are due.
            optimizer.zero_grad()
            # --8<-- [end:loop]
            mean_loss = loss.detach() / session.world_size
            dist.all_reduce(mean_loss)
            if session.rank == 0 and step % 6 == 5:
                print(f"step {step + 1}: loss {mean_loss.item():.4f}")
    # Both sites have the same parameters now.
    shards = [parameter.to_local() for parameter in model.parameters()]
    norm = torch.stack([shard.square().sum() for shard in shards]).sum()
    norms = [torch.zeros_like(norm) for _ in range(session.world_size)]
    dist.all_gather(norms, norm)
    if session.rank == 0:
        sites = [norms[: shape[1]], norms[shape[1] :]]
        print(f"{outer.step} steps, sites are {'equal' if sites[0] == sites[1] else 'different'}")
