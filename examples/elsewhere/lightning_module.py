"""Trains a Lightning-style module under any strategy, with a `fit` of fifteen lines.

    python examples/elsewhere/lightning_module.py --strategy zero2 --ranks 2

`Regression` keeps its own training_step and configure_optimizers. For Lightning's own trainer,
derive it from lightning.LightningModule and let configure_optimizers return an optimizer.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.strategies import StrategyName, find_strategy
from paceline.parallel import Session, distributed_session
from paceline.parallel.strategies import apply_strategy, make_optimizer


class Regression(nn.Module):
    """A small network with its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the loss; containers wrap forward, so forward runs the training step."""
        return self.training_step(batch)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the loss of a batch."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> tuple[type[torch.optim.Optimizer], dict[str, float]]:
        """Returns the optimizer's class and arguments; the strategy decides what it shards."""
        return torch.optim.AdamW, {"lr": 1e-2}


# --8<-- [start:loop]
def fit(module: Regression, strategy: StrategyName, session: Session) -> Iterator[Tensor]:
    """Trains a module; yields the mean loss of every step."""
    model = apply_strategy(strategy, module.to(session.device))
    kind, options = module.configure_optimizers()
    optimizer = make_optimizer(strategy, model, kind, **options)
    generator = torch.Generator().manual_seed(1)
    for _step in range(5):
        inputs = torch.randn(32, 16, generator=generator)
        own = inputs[session.rank :: session.world_size].to(session.device)
        loss = model((own, own.sin().sum(dim=1, keepdim=True)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / session.world_size
        dist.all_reduce(mean)
        yield mean
        # --8<-- [end:loop]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", type=find_strategy, default="ddp")
    parser.add_argument("--ranks", type=int, default=None, help="ranks to start where none are")
    parsed = parser.parse_args()
    with distributed_session(ranks_per_host=parsed.ranks, timeout_s=60) as session:
        torch.manual_seed(0)
        for step, loss in enumerate(fit(Regression(), parsed.strategy, session)):
            if session.rank == 0:
                print(f"step {step}: loss {loss.item():.4f}")
