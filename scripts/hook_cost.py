"""Measures the CPU time per parameter of each container's backward hooks, against torch's DDP.

Two ranks on loopback train 1,200 parameters of a few elements each, so that computation and
communication are negligible. In every round, each container runs one backward pass. The cost of its
hooks is the thread's CPU time in backward minus that of the plain module, per parameter. Appends
one `comparison` record per container to the store.

    python scripts/hook_cost.py results/hook-cost.jsonl
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.benchmarks.harness.records import measured
from paceline.parallel import (
    BucketedDataParallel,
    FlatDataParallel,
    FullyShardedDataParallel,
    RankPool,
    ShardedDataParallel,
    ShardedOptimizer,
)
from paceline.parallel.ranks.hardware import describe_hardware
from paceline.records import RecordStore
from paceline.records.environment import threads_per_rank

WORLD_SIZE = 2
NUM_BLOCKS = 200
WIDTH = 8
WARMUP = 5
BASELINE = "torch_ddp"
CONTAINERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    BASELINE: lambda module: DistributedDataParallel(
        module, gradient_as_bucket_view=True, static_graph=True
    ),
    "flat": FlatDataParallel,
    "bucketed": BucketedDataParallel,
    "sharded": ShardedDataParallel,
    "fully_sharded": FullyShardedDataParallel,
}


class Block(nn.Module):
    """A block with six parameters of a few elements each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input plus the output of a small MLP."""
        added: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + added


class Stack(nn.Module):
    """Many blocks in a `ModuleList`, which containers that shard by layer recognize."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Runs all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def backward_times(_rank: int, _world_size: int, rounds: int) -> dict[str, list[float]]:
    """Returns this thread's CPU seconds in each container's backward passes."""
    torch.manual_seed(0)
    models = {name: wrap(Stack()) for name, wrap in CONTAINERS.items()}
    optimizers: dict[str, torch.optim.Optimizer] = {
        name: ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
        if name == "sharded"
        else torch.optim.SGD(model.parameters(), lr=0.01)
        for name, model in models.items()
    }
    x = torch.randn(2, WIDTH)
    times: dict[str, list[float]] = {name: [] for name in models}
    for round_index in range(-WARMUP, rounds):
        for name in models if round_index % 2 else reversed(models):
            loss = models[name](x).mean()
            started = time.thread_time()
            loss.backward()
            if round_index >= 0:
                times[name].append(time.thread_time() - started)
            optimizers[name].step()
            optimizers[name].zero_grad()
    return times


def main() -> int:
    """Measures, prints and records the costs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    num_parameters = len(list(Stack().parameters()))
    with RankPool(WORLD_SIZE, timeout_s=300) as pool:
        times = pool.run(backward_times, arguments.rounds)[0]
    plain_s = statistics.median(times["plain"])
    costs = {
        name: [(seconds - plain_s) / num_parameters for seconds in samples]
        for name, samples in times.items()
        if name != "plain"
    }
    baseline = statistics.median(costs[BASELINE])
    for name, samples in costs.items():
        cost = statistics.median(samples)
        print(f"{name}: {cost * 1e6:.1f} us per parameter, {cost / baseline:.2f} of {BASELINE}")
        if name == BASELINE:
            continue
        record = measured(
            "comparison",
            {
                "subject": f"hooks of {name}",
                "baseline": f"hooks of {BASELINE}",
                "operation": f"backward, CPU time per parameter of {num_parameters}",
                "world_size": WORLD_SIZE,
                **describe_hardware(torch.device("cpu")).as_case(),
                "threads": threads_per_rank(WORLD_SIZE),
                "warmup": WARMUP,
                "rounds": arguments.rounds,
            },
            {"time_ratio": cost / baseline, "time_s": samples, "baseline_time_s": costs[BASELINE]},
        )
        RecordStore(arguments.store).append(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
