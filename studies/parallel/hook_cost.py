"""Measures the host's time per parameter in training steps of each container, and of torch's.

The host's time is the CPU time of the thread that trains, as if the device and the network were
infinitely fast: tensors have a few elements, and torch's fake process group, which sends nothing,
makes this process one of two ranks. With real messages, gloo would copy Paceline's in this thread
and FSDP2's in threads of its own, which would compare gloo with gloo.

In every round each container makes one training step. The cost of a container is the time of a
step, or of one of its phases, minus that of the plain module and its optimizer, per parameter. One
model is a stack of many tiny layers, the other a Transformer of tiny width. Prints the costs, and
appends a `comparison` record per container, baseline, model and phase to the store, whose times
include those of the plain module.

    python -m studies.parallel.hook_cost results/hook-cost.jsonl
"""

import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.core import ModelShape
from paceline.core.strategies import StrategyName
from paceline.models import TransformerLM
from paceline.parallel.strategies import apply_strategy, make_optimizer
from paceline.records import CaseValue
from studies.harness.records import Store, machine_case, record_comparison
from studies.harness.runs import fake_rank
from studies.harness.study import study_parser
from studies.harness.turns import interleaved
from studies.parallel.many_layers import WIDTH, Stack

WORLD_SIZE = 2
NUM_BLOCKS = 200
SHAPE = ModelShape(vocab_size=16, d_model=8, d_ff=16, num_layers=24, num_heads=1)
WARMUP = 5
PLAIN: StrategyName = "none"
BASELINES: Mapping[StrategyName, tuple[StrategyName, ...]] = {
    "flat": ("torch_ddp",),
    "ddp": ("torch_ddp",),
    "zero1": ("torch_ddp", "torch_zero"),
    "zero2": ("torch_ddp", "torch_zero"),
    "fsdp": ("torch_ddp", "torch_fsdp2"),
}
"""What each of Paceline's containers is compared with."""
STRATEGIES: tuple[StrategyName, ...] = (
    PLAIN,
    *dict.fromkeys(name for names in BASELINES.values() for name in names),
    *BASELINES,
)
Times: TypeAlias = dict[StrategyName, dict[str, list[float]]]
"""Seconds of each strategy and phase, one per round."""
PHASES = ("forward", "backward", "optimizer", "zero_grad")
STEP = "step"


def stack_loss() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Returns many tiny layers, and a function that computes their loss."""
    x = torch.randn(2, WIDTH)
    return Stack(NUM_BLOCKS), lambda model: model(x).mean()


def transformer_loss() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Returns a Transformer of tiny width, and a function that computes its loss."""
    tokens = torch.arange(4).view(1, 4)
    return (
        TransformerLM(SHAPE, attention="naive"),
        lambda model: F.cross_entropy(model(tokens)[0], tokens[0]),
    )


MODELS = {
    f"stack of {NUM_BLOCKS} blocks, 6 parameters each": stack_loss,
    f"Transformer of {SHAPE.num_layers} blocks, 9 parameters each": transformer_loss,
}


def wrap(name: StrategyName, module: nn.Module) -> nn.Module:
    """Applies a strategy; FSDP2 without the wrappers that count its messages."""
    if name != "torch_fsdp2":
        wrapped = apply_strategy(name, module)
        if isinstance(wrapped, DistributedDataParallel):
            # DDP's own all-reduce needs a result, which the fake process group does not have.
            wrapped.register_comm_hook(None, _send_nothing)
        return wrapped
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    blocks: Any = module.blocks
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _send_nothing(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def one_step(
    model: nn.Module, optimizer: Optimizer, compute_loss: Callable[[nn.Module], Tensor]
) -> dict[str, float]:
    """Returns this thread's CPU seconds in each phase of a training step, and in all of it."""
    moments = [time.thread_time()]
    loss = compute_loss(model)
    moments.append(time.thread_time())
    loss.backward()  # type: ignore[no-untyped-call]
    moments.append(time.thread_time())
    optimizer.step()
    moments.append(time.thread_time())
    optimizer.zero_grad()
    moments.append(time.thread_time())
    ends = zip(PHASES, moments[1:], moments[:-1], strict=True)
    return {STEP: moments[-1] - moments[0], **{name: end - start for name, end, start in ends}}


def measure(
    make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]],
    strategies: tuple[StrategyName, ...],
    rounds: int,
) -> Times:
    """Returns the seconds of each strategy and phase, one per round."""
    ways: dict[StrategyName, Callable[[], dict[str, float]]] = {}
    for name in strategies:
        torch.manual_seed(0)
        module, compute_loss = make()
        model = wrap(name, module)
        # Accelerators update all parameters by a few calls of foreach kernels; CPUs on request.
        optimizer = make_optimizer(name, model, torch.optim.SGD, lr=0.01, foreach=True)
        ways[name] = functools.partial(one_step, model, optimizer, compute_loss)
    interleaved(ways, 0, warmup=WARMUP)
    # The objects of other containers must not make the garbage collector slower.
    gc.collect()
    gc.freeze()
    found = interleaved(ways, rounds)
    return {
        name: {phase: [one[phase] for one in samples] for phase in (STEP, *PHASES)}
        for name, samples in found.items()
    }


def main() -> int:
    """Measures, prints and records the costs."""
    parser = study_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    with fake_rank(WORLD_SIZE):
        for model, make in MODELS.items():
            num_parameters = len(list(make()[0].parameters()))
            measured = measure(make, STRATEGIES, arguments.rounds)
            per_parameter = {
                name: {
                    phase: [one / num_parameters for one in samples]
                    for phase, samples in phases.items()
                }
                for name, phases in measured.items()
            }
            case = {"model": model, "world_size": WORLD_SIZE, "warmup": WARMUP}
            record(arguments.store, {**case, **machine_case(WORLD_SIZE)}, per_parameter)
    return 0


def record(store: Store, case: Mapping[str, CaseValue], seconds: Times) -> None:
    """Prints and records the times per parameter of all strategies on a model."""
    plain = seconds[PLAIN]
    print(f"{case['model']}: host time per parameter in us, beyond the plain module's")
    print(f"{'':12}" + "".join(f"{phase:>11}" for phase in plain))
    for name, phases in seconds.items():
        costs = [
            statistics.median(samples) - (name != PLAIN) * statistics.median(plain[phase])
            for phase, samples in phases.items()
        ]
        print(f"{name:12}" + "".join(f"{cost * 1e6:11.2f}" for cost in costs), flush=True)
    for subject, baselines in BASELINES.items():
        for baseline, phase in itertools.product(baselines, plain):
            both = seconds[subject][phase], seconds[baseline][phase]
            names = {"subject": subject, "baseline": baseline, "phase": phase}
            what = {**case, **names, "operation": "host time per parameter"}
            record_comparison(store, what, *both, more={"plain_time_s": plain[phase]})


if __name__ == "__main__":
    sys.exit(main())
