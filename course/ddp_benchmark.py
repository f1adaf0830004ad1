"""Shared code of the courses' data-parallel scripts: times one strategy on every rank."""

import argparse
import statistics

import torch
import torch.distributed as dist

from paceline.accounting.counts import count_parameters
from paceline.accounting.memory.step import minimum_step_bytes
from paceline.benchmarks.config import DataParallelSweep
from paceline.benchmarks.strategies import COMMUNICATION, EXPOSED, STEP, StrategyComparison
from paceline.core import BatchShape, model_preset, precision_preset, preset_names
from paceline.core.strategies import StrategyName
from paceline.core.units import format_decimal
from paceline.devices.hardware import usable_memory_bytes
from paceline.parallel import distributed_session
from paceline.parallel.bucket_size import measure_group
from paceline.parallel.strategies import message_sizes

# The courses' sizes, largest first; the hand-outs measure xl on two GPUs.
SIZES = ("xl", "large", "medium", "small", "bytes-34M")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that both scripts accept beyond the hand-outs' own flags."""
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


def default_ranks(ranks: int | None) -> int | None:
    """Returns `ranks` if given; otherwise 2 without GPUs, or None for one rank per GPU."""
    return ranks if ranks is not None or torch.cuda.is_available() else 2


def benchmark(
    arguments: argparse.Namespace, strategy: StrategyName, bucket_size_mb: float | None
) -> None:
    """Times one strategy and prints its iteration and communication times."""
    with distributed_session(ranks_per_host=default_ranks(arguments.ranks)) as session:
        size = arguments.size or largest_that_fits(arguments, session.device)
        sweep = DataParallelSweep(
            strategies=(strategy,),
            bucket_size_mb=() if bucket_size_mb is None else (bucket_size_mb,),
            model=(size,),
            batch=arguments.batch_size,
            context=arguments.context_length,
            device="cuda" if session.device.type == "cuda" else "cpu",
        )
        comparison = StrategyComparison(next(iter(sweep.cases())), session.device)
        for index in range(arguments.warmup + arguments.steps):
            comparison.run_round(measured=index >= arguments.warmup)
        (result,) = comparison.results()
        sizes = message_sizes(comparison.steps[0].model)
        predicted_s = 0.0
        if session.world_size > 1:
            fit = measure_group(dist.group.WORLD, session.device).fit
            predicted_s = sum(fit.time_s(num_bytes) for num_bytes in sizes)
        if session.rank != 0:
            return
        parameters = count_parameters(model_preset(size)).total
        print(
            f"model: {size}, {parameters:,} parameters, {session.world_size} ranks on "
            f"{session.device.type} with {session.backend}"
        )
        print(f"iteration time: {_milliseconds(result.samples[STEP])}")
        print(f"communication time after backward: {_milliseconds(result.samples[EXPOSED])}")
        total = format_decimal(sum(sizes), "B")
        print(
            f"communication time alone: {_milliseconds(result.samples.get(COMMUNICATION, [0.0]))} "
            f"for {total} in {len(sizes)} messages; the all-reduce benchmark predicts "
            f"{predicted_s * 1e3:.1f} ms"
        )


def largest_that_fits(arguments: argparse.Namespace, device: torch.device) -> str:
    """Returns the largest of the courses' sizes that fits in this machine's memory."""
    usable = usable_memory_bytes(device)
    sharers = 1 if device.type == "cuda" else dist.get_world_size()
    batch = BatchShape(num_sequences=arguments.batch_size, context_length=arguments.context_length)
    chosen = SIZES[-1]
    for size in SIZES:
        needed = minimum_step_bytes(model_preset(size), batch, precision_preset("float32"), "train")
        # 25% more than a step's minimum, for activations and a copy of gradients in flight.
        if usable is None or 1.25 * needed * sharers <= usable:
            chosen = size
            break
    # Ranks may see different amounts of free memory, so the first rank decides.
    agreed = [chosen]
    dist.broadcast_object_list(agreed, src=0, device=device)
    return agreed[0]


def _milliseconds(samples: list[float]) -> str:
    return f"{statistics.median(samples) * 1e3:.1f} ms"
