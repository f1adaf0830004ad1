"""One loop for every strategy, Paceline's and torch's: only the name differs.

The same global batches are divided among any number of ranks, so that the printed losses depend
neither on the number of ranks nor on the strategy:

    python examples/any_strategy.py zero2 torch_fsdp2 --ranks 2 --max-norm 1
"""

import argparse
import contextlib

import torch
import torch.distributed as dist

from paceline.core import ModelShape
from paceline.core.strategies import StrategyName, find_strategy
from paceline.models import TransformerLM, next_token_loss
from paceline.parallel import Session, distributed_session
from paceline.parallel.strategies import (
    apply_strategy,
    clip_grad_norm,
    make_optimizer,
    without_synchronization,
)

STEPS, ACCUMULATION, GLOBAL_BATCH, CONTEXT = 4, 2, 12, 32
SHAPE = ModelShape(vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=2)


# --8<-- [start:loop]
def train(strategy: StrategyName, session: Session, max_norm: float | None) -> list[torch.Tensor]:
    """Trains a small model; returns the mean loss of each step."""
    torch.manual_seed(0)
    model = apply_strategy(strategy, TransformerLM(SHAPE).to(session.device))
    optimizer = make_optimizer(strategy, model, torch.optim.AdamW, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(STEPS):
        total = torch.zeros((), device=session.device)
        # torch's DDP records its static graph in the first pass, which must be synchronized.
        num_passes = ACCUMULATION if step else 1
        for micro in range(num_passes):
            batch = torch.randint(64, (GLOBAL_BATCH, CONTEXT + 1), generator=generator)
            own = batch[session.rank :: session.world_size].to(session.device)
            is_local = micro < num_passes - 1
            with without_synchronization(model) if is_local else contextlib.nullcontext():
                loss = next_token_loss(model(own[:, :-1]), own[:, 1:]) / num_passes
                loss.backward()
            total += loss.detach() / session.world_size
        if max_norm is not None:
            clip_grad_norm(model, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total)
    return losses


# --8<-- [end:loop]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("strategies", nargs="+", type=find_strategy)
    parser.add_argument("--ranks", type=int, default=None, help="ranks to start where none are")
    parser.add_argument("--max-norm", type=float, default=None, help="clip gradients to this norm")
    arguments = parser.parse_args()
    with distributed_session(ranks_per_host=arguments.ranks, timeout_s=60) as session:
        for strategy in arguments.strategies:
            losses = train(strategy, session, arguments.max_norm)
            if session.rank == 0:
                print(f"{strategy}: {' '.join(f'{loss.item():.4f}' for loss in losses)}")
