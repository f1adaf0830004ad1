"""Measures the overhead of torch's engine per block, beyond its kernels and messages.

A pass runs blocks that are so narrow that their compute and transfers take almost no time, under
several layouts of the ranks. What remains is the fixed cost of a block:

    plain      each rank by itself: modules, launches, autograd
    tensor     matrices split over the tensor ranks: DTensor's dispatch, and the latency of two
               all-reduces forward and two backward
    sequence   norms and residuals split as well: twice as many collectives
    shard      parameters sharded over all ranks by FSDP2: its hooks, and the latency of two
               all-gathers and a reduce-scatter
    pipeline   stages of one block: torch's schedule, and the latency of one message to the next
               stage and one to the previous stage
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from paceline.benchmarks.calibration.compute import Probe
from paceline.benchmarks.harness.measure import Stopwatch
from paceline.core.plan import ParallelLayout
from paceline.core.specs import ModelShape
from paceline.models import TransformerLM
from paceline.parallel.mesh.apply import apply_layout
from paceline.parallel.mesh.groups import MeshGroups
from paceline.parallel.mesh.loss import summed_loss, vocabulary_parallel
from paceline.parallel.mesh.pipeline import Pipeline
from paceline.parallel.mesh.tensor import apply_tensor_parallelism
from paceline.training.layouts.pipeline import own_stages

BLOCK_TIME = "block_time_s"
_MOST_TENSOR_RANKS = 8
_MOST_STAGES = 4
_NUM_LAYERS = 4
_TOKENS = 16
_MICRO_BATCHES = 8


def engine_layouts(world_size: int, ranks_per_host: int) -> dict[str, ParallelLayout]:
    """Returns the layouts to time by name; tensor ranks share a host if it has several."""
    tensor = math.gcd(_MOST_TENSOR_RANKS, ranks_per_host)
    if tensor == 1:
        tensor = math.gcd(_MOST_TENSOR_RANKS, world_size)
    layouts = {"shard": ParallelLayout(shard=world_size, sharding="parameters")}
    if tensor > 1:
        rest = world_size // tensor
        layouts["tensor"] = ParallelLayout(tensor=tensor, replicate=rest)
        layouts["sequence"] = ParallelLayout(tensor=tensor, replicate=rest, sequence_parallel=True)
    stages = math.gcd(_MOST_STAGES, world_size)
    if stages > 1:
        layouts["pipeline"] = ParallelLayout(pipeline=stages, replicate=world_size // stages)
    return layouts


def engine_probes(device: torch.device, ranks_per_host: int) -> Iterator[Probe]:
    """Yields a probe for every layout, which all ranks run together."""
    yield Probe("plain", _passes(_model(_NUM_LAYERS, device), device, is_split=False))
    for name, layout in engine_layouts(dist.get_world_size(), ranks_per_host).items():
        groups = MeshGroups(layout, dist.get_rank(), dist.get_world_size(), device)
        if name == "pipeline":
            yield Probe(name, _scheduled(groups))
            continue
        model = _model(_NUM_LAYERS, device)
        # Replicas do not average gradients here: that is not a cost of the tensor axis.
        if groups.tensor is None:
            apply_layout(model, groups)
        else:
            apply_tensor_parallelism(
                model, groups.tensor, sequence_parallel=layout.sequence_parallel
            )
        yield Probe(name, _passes(model, device, is_split=groups.tensor is not None))


def _model(num_layers: int, device: torch.device) -> TransformerLM:
    shape = ModelShape(
        vocab_size=256,
        d_model=64,
        d_ff=128,
        num_layers=num_layers,
        num_heads=_MOST_TENSOR_RANKS,
        max_context_length=2 * _TOKENS,
    )
    with device:
        return TransformerLM(shape)


def _passes(
    model: TransformerLM, device: torch.device, *, is_split: bool
) -> Callable[[int], dict[str, float]]:
    """Returns a function that times forward and backward of one sequence, per block."""
    tokens = torch.zeros((1, _TOKENS), dtype=torch.int64, device=device)

    def run(repetitions: int) -> dict[str, float]:
        dist.barrier()
        watch = Stopwatch(device)
        with vocabulary_parallel(is_split):
            for _ in range(repetitions):
                torch.autograd.backward(summed_loss(model(tokens), tokens))
                model.zero_grad()
        return {BLOCK_TIME: watch.lap() / (repetitions * _NUM_LAYERS)}

    return run


def _scheduled(groups: MeshGroups) -> Callable[[int], dict[str, float]]:
    """Returns a function that times a micro-batch's pass through a stage of one block."""
    num_stages = groups.layout.pipeline
    stages = own_stages(_model(num_stages, groups.device), groups, _TOKENS)
    assert groups.pipeline is not None
    pipeline = Pipeline(
        stages,
        num_stages=num_stages,
        num_micro_batches=_MICRO_BATCHES,
        loss=summed_loss,
        group=groups.pipeline.get_group(),
        device=groups.device,
    )
    tokens = torch.zeros((_MICRO_BATCHES, _TOKENS), dtype=torch.int64, device=groups.device)

    def run(repetitions: int) -> dict[str, float]:
        dist.barrier()
        watch = Stopwatch(groups.device)
        for _ in range(repetitions):
            pipeline.forward_and_backward(tokens, tokens)
            for stage in stages.values():
                stage.zero_grad()
        # Fill and drain: the last stage waits for the first micro-batch, the first for the last.
        return {BLOCK_TIME: watch.lap() / (repetitions * (_MICRO_BATCHES + num_stages - 1))}

    return run
