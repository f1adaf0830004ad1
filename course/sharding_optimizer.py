"""Measures the hand-outs' sharded optimizer: peak memory at three instants, and step time.

python course/sharding_optimizer.py
srun --gpus-per-node=2 uv run course/sharding_optimizer.py --size xl
"""

import argparse
import statistics
import sys

from ddp_benchmark import default_ranks, largest_that_fits

from paceline.accounting import count_parameters
from paceline.benchmarks.config import OptimizerSweep
from paceline.benchmarks.optimizer_memory import OPTIMIZER, STEP, OptimizerResult, measure
from paceline.core import model_preset, preset_names
from paceline.core.strategies import StrategyName
from paceline.core.units import format_binary_bytes
from paceline.parallel import distributed_session

STRATEGIES: dict[str, StrategyName] = {"without sharding": "ddp", "with sharding": "zero1"}
INSTANTS = {
    "after_init": "after init",
    "before_step": "before the optimizer step",
    "after_step": "after the optimizer step",
}


def report(title: str, result: OptimizerResult) -> None:
    """Prints the measurements of one strategy."""
    print(f"{title}:")
    for instant, text in INSTANTS.items():
        parts = result.memory[instant]
        print(
            f"  peak memory {text}: {format_binary_bytes(parts.total)} "
            f"(parameters {format_binary_bytes(parts.parameters)}, "
            f"gradients {format_binary_bytes(parts.gradients)}, "
            f"optimizer state {format_binary_bytes(parts.optimizer_state)})"
        )
    step, optimizer = (statistics.median(result.samples[name]) * 1e3 for name in (STEP, OPTIMIZER))
    print(f"  iteration time: {step:.1f} ms, of which the optimizer {optimizer:.1f} ms")


def main() -> int:
    """Measures training without and with a sharded optimizer, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--size",
        choices=preset_names(),
        metavar="PRESET",
        help="by default the largest of the courses' sizes that fits",
    )
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank")
    parser.add_argument("--context-length", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=None, help="ranks to start where none are")
    arguments = parser.parse_args()
    with distributed_session(ranks_per_host=default_ranks(arguments.ranks)) as session:
        size = arguments.size or largest_that_fits(arguments, session.device)
        sweep = OptimizerSweep(
            strategies=tuple(STRATEGIES.values()),
            model=(size,),
            batch=arguments.batch_size,
            context=arguments.context_length,
            warmup=arguments.warmup,
            steps=arguments.steps,
            device="cuda" if session.device.type == "cuda" else "cpu",
        )
        results = [measure(session.device, case, sweep.time_limit_s) for case in sweep.cases()]
        if session.rank == 0:
            print(
                f"model: {size}, {count_parameters(model_preset(size)).total:,} parameters, "
                f"{session.world_size} ranks on {session.device.type} with {session.backend}"
            )
            for title, result in zip(STRATEGIES, results, strict=True):
                report(title, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
