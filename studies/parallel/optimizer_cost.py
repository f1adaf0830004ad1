"""Measures the Python cost of a ShardedOptimizer step: CPU time per bucket and per parameter.

Two ranks train a model of many small layers, whose arithmetic is negligible, with few buckets and
with many. The CPU time of the calling thread (not the elapsed time, which depends on other load) is
compared with that of torch's optimizer over the same parameters. Prints the costs; writes no
record. Run it on an idle machine:

    python -m studies.parallel.optimizer_cost --layers 200 --steps 40
"""

import statistics
import time

import torch
from torch import nn

from paceline.core.units import MIB
from paceline.parallel import ShardedDataParallel, ShardedOptimizer, run_ranks
from studies.harness.study import study_parser
from studies.parallel.many_layers import WIDTH, Stack


def _measure(
    _rank: int, _world_size: int, num_layers: int, steps: int, num_buckets: int, optimizer: str
) -> dict[str, float]:
    """Returns the median CPU milliseconds of a step, and the numbers of buckets and parameters."""
    torch.manual_seed(0)
    optimizer_cls = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    inner = Stack(num_layers)
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
        model(torch.ones(2, WIDTH)).mean().backward()
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
    parser = study_parser(__doc__, store=None)
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
