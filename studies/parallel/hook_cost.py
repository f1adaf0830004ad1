"""Measures the CPU time per parameter of each container's backward hooks, against torch's DDP.

Two ranks on loopback train 1,200 parameters of a few elements each, so that computation and
communication are negligible. In every round, each container runs one backward pass. The cost of its
hooks is the thread's CPU time in backward minus that of the plain module, per parameter. Appends
one `comparison` record per container to the store.

    python -m studies.parallel.hook_cost results/hook-cost.jsonl
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.parallel import (
    BucketedDataParallel,
    FlatDataParallel,
    FullyShardedDataParallel,
    RankPool,
    ShardedDataParallel,
    ShardedOptimizer,
)
from studies.harness.records import append_record, machine_case
from studies.harness.study import study_parser
from studies.harness.turns import interleaved
from studies.parallel.many_layers import WIDTH, Stack

WORLD_SIZE = 2
NUM_BLOCKS = 200
WARMUP = 5
BASELINE = "torch_ddp"
CONTAINERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    BASELINE: lambda module: DistributedDataParallel(
        module, gradient_as_bucket_view=True, static_graph=True
    ),
    "flat": FlatDataParallel,
    "ddp": BucketedDataParallel,
    "zero2": ShardedDataParallel,
    "fsdp": FullyShardedDataParallel,
}


def backward_times(_rank: int, _world_size: int, rounds: int) -> dict[str, list[float]]:
    """Returns this thread's CPU seconds in each container's backward passes."""
    torch.manual_seed(0)
    models = {name: wrap(Stack(NUM_BLOCKS)) for name, wrap in CONTAINERS.items()}
    optimizers: dict[str, torch.optim.Optimizer] = {
        name: ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
        if name == "zero2"
        else torch.optim.SGD(model.parameters(), lr=0.01)
        for name, model in models.items()
    }
    x = torch.randn(2, WIDTH)

    def backward(name: str) -> float:
        loss = models[name](x).mean()
        started = time.thread_time()
        loss.backward()
        seconds = time.thread_time() - started
        optimizers[name].step()
        optimizers[name].zero_grad()
        return seconds

    ways = {name: functools.partial(backward, name) for name in models}
    return interleaved(ways, rounds, warmup=WARMUP)


def main() -> int:
    """Measures, prints and records the costs."""
    parser = study_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    num_parameters = len(list(Stack(NUM_BLOCKS).parameters()))
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
        case = {
            "subject": f"hooks of {name}",
            "baseline": f"hooks of {BASELINE}",
            "operation": f"backward, CPU time per parameter of {num_parameters}",
            "world_size": WORLD_SIZE,
            **machine_case(WORLD_SIZE),
            "warmup": WARMUP,
            "rounds": arguments.rounds,
        }
        numbers = {
            "time_ratio": cost / baseline,
            "time_s": samples,
            "baseline_time_s": costs[BASELINE],
        }
        append_record(arguments.store, "comparison", case, numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
