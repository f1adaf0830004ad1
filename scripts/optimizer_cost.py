"""Measures the Python cost of a ShardedOptimizer step: CPU time per bucket and per parameter.

Two ranks train a model of many small layers, whose arithmetic is negligible, with few buckets and
with many. The CPU time of the calling thread (not the elapsed time, which depends on other load) is
compared with that of torch's optimizer over the same parameters. Prints the costs; writes no
record. Run it on an idle machine:

    python scripts/optimizer_cost.py --layers 200 --steps 40
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from paceline.core.units import MIB
from paceline.parallel import ShardedDataParallel, ShardedOptimizer, run_ranks

_WIDTH = 8


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


def _measure(
    _rank: int, _world_size: int, num_layers: int, steps: int, num_buckets: int, optimizer: str
) -> dict[str, float]:
    """Returns the median CPU milliseconds of a step, and the numbers of buckets and parameters."""
    torch.manual_seed(0)
    optimizer_cls = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    inner = nn.Sequential(*(_Block() for _ in range(num_layers)))
    num_parameters = len(list(inner.parameters()))
    if num_buckets == 0:
        model: nn.Module = inner
        stepper: torch.optim.Optimizer = optimizer_cls(inner.parameters(), lr=0.01)
    else:
        num_bytes = sum(parameter.nbytes for parameter in inner.parameters())
        model = ShardedDataParallel(inner, num_bytes / num_buckets / MIB)
        stepper = ShardedOptimizer(model.parameters(), optimizer_cls, lr=0.01)
    samples = []
    for _ in range(steps):
        model(torch.ones(2, _WIDTH)).mean().backward()
        began = time.thread_time()
        stepper.step()
        stepper.zero_grad()
        samples.append(time.thread_time() - began)
    if isinstance(model, ShardedDataParallel):
        num_buckets = len(model.message_bytes())
    return {
        "step_ms": 1e3 * statistics.median(samples[steps // 4 :]),
        "num_buckets": num_buckets,
        "num_parameters": num_parameters,
    }


def main() -> None:
    """Prints one line per case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    arguments = parser.parse_args()
    cases = {}
    for num_buckets in (0, 1, 20):
        cases[num_buckets] = run_ranks(
            _measure, 2, arguments.layers, arguments.steps, num_buckets, arguments.optimizer
        )[0]
        case = cases[num_buckets]
        name = "ShardedOptimizer" if num_buckets else f"torch's {arguments.optimizer}"
        print(
            f"{name}: {case['num_parameters']:.0f} parameters in "
            f"{case['num_buckets']:.0f} buckets, {case['step_ms']:.2f} ms per step"
        )
    few, many = cases[1], cases[20]
    per_bucket_ms = (many["step_ms"] - few["step_ms"]) / (many["num_buckets"] - few["num_buckets"])
    per_parameter_us = 1e3 * few["step_ms"] / few["num_parameters"]
    print(f"per bucket {per_bucket_ms:.3f} ms, per parameter {per_parameter_us:.2f} us")


if __name__ == "__main__":
    main()
