"""The hand-outs' naive_ddp: equality with one process, and the cost of communication.

python course/benchmark_naive_ddp.py --model toy
srun --gpus-per-node=2 uv run course/benchmark_naive_ddp.py --model transformer
"""

import argparse
import sys

import torch
from ddp_benchmark import add_arguments, benchmark, default_ranks
from torch import nn

from paceline.parallel import NaiveDataParallel, distributed_session

STEPS = 10
SEQUENCES = 8


def toy_model() -> nn.Module:
    """Returns the same small model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def compare_with_baseline(ranks: int | None) -> int:
    """Trains a toy model on all ranks and on one with all data, and compares the weights."""
    with distributed_session(ranks_per_host=default_ranks(ranks)) as session:
        alone = toy_model().to(session.device)
        together = NaiveDataParallel(toy_model().to(session.device))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, together)]
        for step in range(STEPS):
            torch.manual_seed(step)
            inputs = torch.randn(session.world_size, SEQUENCES, 16).to(session.device)
            targets = torch.randn(session.world_size, SEQUENCES, 4).to(session.device)
            nn.functional.mse_loss(alone(inputs), targets).backward()
            nn.functional.mse_loss(together(inputs[session.rank]), targets[session.rank]).backward()
            together.finish_gradient_synchronization()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, expected), actual in zip(
            alone.named_parameters(), together.parameters(), strict=True
        ):
            if not torch.allclose(actual, expected, atol=1e-6):
                sys.exit(f"rank {session.rank}: {name} differs from the baseline")
        if session.rank == 0:
            print("Naive DDP matches baseline!")
    return 0


def main() -> int:
    """Runs the comparison for the toy model, or the benchmark for the Transformer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=("toy", "transformer"), default="transformer")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.model == "toy":
        return compare_with_baseline(arguments.ranks)
    benchmark(arguments, "naive", None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
