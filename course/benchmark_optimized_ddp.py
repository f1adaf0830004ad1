"""Times the hand-outs' improved containers: flat, one message per parameter, and buckets.

srun --gpus-per-node=2 uv run course/benchmark_optimized_ddp.py --mode flat
srun --gpus-per-node=2 uv run course/benchmark_optimized_ddp.py --mode individual
srun --gpus-per-node=2 uv run course/benchmark_optimized_ddp.py --mode bucketed \
        --bucket-size-mb 10
"""

import argparse
import sys

from ddp_benchmark import add_arguments, benchmark

from paceline.core.strategies import StrategyName

STRATEGIES: dict[str, StrategyName] = {
    "flat": "flat",
    "individual": "overlapped",
    "bucketed": "ddp",
}


def main() -> int:
    """Times one of the containers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mode", choices=tuple(STRATEGIES), required=True)
    parser.add_argument(
        "--bucket-size-mb", "--bucket-mb", type=float, default=25.0, help="MiB, for bucketed"
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    bucketed = arguments.mode == "bucketed"
    benchmark(arguments, STRATEGIES[arguments.mode], arguments.bucket_size_mb if bucketed else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
