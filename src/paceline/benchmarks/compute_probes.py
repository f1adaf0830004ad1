"""Probes for the compute parts of a training step and for the overhead of torch's engine.

Probes of compute parts use memory as a step does. Linear layers rotate through several weights and
inputs, so that none is still cached from its previous use. Elementwise results are kept for a
while, as activations are. A run repeats its part before it waits for the device, so that a GPU's
queue is as full as in training.

The engine's overhead is what a block costs beyond its kernels and messages. A pass runs blocks that
are so narrow that their compute and transfers take almost no time, under several layouts of the
ranks. What remains is the fixed cost of a block:

    plain      each rank by itself: modules, launches, autograd
    tensor     matrices split over the tensor ranks: DTensor's dispatch, and the latency of two
               all-reduces forward and two backward
    sequence   norms and residuals split as well: twice as many collectives
    shard      parameters sharded over all ranks by FSDP2: its hooks, and the latency of two
               all-gathers and a reduce-scatter
    pipeline   stages of one block: torch's schedule, and the latency of one message to the next
               stage and one to the previous stage
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.accounting.counts import model_segments
from paceline.benchmarks.harness.measure import Stopwatch
from paceline.core.errors import UsageError
from paceline.core.host import physical_memory_bytes
from paceline.core.plan import ParallelLayout
from paceline.core.specs import BatchShape, ModelShape
from paceline.core.units import MIB, format_binary_bytes
from paceline.kernels.attention.api import attention
from paceline.models import TransformerLM
from paceline.parallel.mesh.layout import MeshGroups, apply_layout
from paceline.parallel.mesh.pipeline import Pipeline
from paceline.parallel.mesh.tensor import apply_tensor_parallelism, summed_loss, vocabulary_parallel
from paceline.training.parallelize import own_stages

# More than the caches of a core hold.
_WEIGHTS_BYTES = 32 * MIB
_MOST_COPIES = 16
_STREAM_ELEMENTS = 2**18
_STREAM_RESULTS = 64
_COPY_ELEMENTS = 2**24
_CALLS = 300
_OPTIMIZER_TENSORS = 8
_OPTIMIZER_ELEMENTS = 2**20


class LinearShape(NamedTuple):
    """A linear layer applied to a batch."""

    tokens: int
    inputs: int
    outputs: int


class AttentionShape(NamedTuple):
    """Causal attention of a batch."""

    batch: int
    context: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class ComputeShapes(NamedTuple):
    """Shapes to time, each once."""

    linears: tuple[LinearShape, ...]
    attentions: tuple[AttentionShape, ...]


def compute_shapes(batches: Iterable[tuple[ModelShape, BatchShape]]) -> ComputeShapes:
    """Returns the shapes to time for some models and their batches, each once."""
    batches = list(batches)
    linears = [
        LinearShape(batch.tokens_per_pass, linear.inputs, linear.outputs)
        for shape, batch in batches
        for segment in model_segments(shape)
        for linear in segment.linears
    ]
    attentions = [
        AttentionShape(
            batch=batch.num_sequences,
            context=batch.context_length,
            num_heads=shape.num_heads,
            num_kv_heads=shape.key_value_heads,
            head_dim=shape.head_width,
        )
        for shape, batch in batches
    ]
    return ComputeShapes(tuple(dict.fromkeys(linears)), tuple(dict.fromkeys(attentions)))


class Probe(NamedTuple):
    """A timed part of a step."""

    name: str
    run: Callable[[int], dict[str, float]]
    """Runs the part this many times and returns the seconds per run, or per unit, by name."""


def make_probes(shapes: ComputeShapes, device: torch.device) -> list[Probe]:
    """Returns a probe for every shape, and the probes that do not depend on shapes."""
    _require_room(shapes)
    return [
        *(_linear(shape, device) for shape in shapes.linears),
        *(_attention(shape, device) for shape in shapes.attentions),
        *(make(device) for make in (_stream, _copy, _call, _optimizer)),
    ]


def _linear(shape: LinearShape, device: torch.device) -> Probe:
    """A linear layer: its output, then the gradients of its input and weight."""
    layers: Iterator[tuple[Tensor, Tensor, Tensor]] = zip(
        itertools.cycle(_several(shape.outputs, shape.inputs, device)),
        itertools.cycle(_several(shape.tokens, shape.inputs, device)),
        itertools.cycle(_several(shape.tokens, shape.outputs, device)),
    )

    def run(repetitions: int) -> dict[str, float]:
        watch = Stopwatch(device)
        for _ in range(repetitions):
            weight, x, _gradient = next(layers)
            F.linear(x, weight)
        forward_s = watch.lap()
        for _ in range(repetitions):
            weight, x, gradient = next(layers)
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), x)
        return _both_passes(forward_s, watch.lap(), repetitions)

    return Probe(f"linear {shape.tokens} x {shape.inputs} x {shape.outputs}", run)


def _attention(shape: AttentionShape, device: torch.device) -> Probe:
    """Causal attention, forward and backward."""
    query, key, value = inputs = [
        torch.randn(
            *(shape.batch, heads, shape.context, shape.head_dim), device=device, requires_grad=True
        )
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    ]
    gradient = torch.randn_like(query)

    def run(repetitions: int) -> dict[str, float]:
        watch = Stopwatch(device)
        layers = [
            attention(query, key, value, causal=True, implementation="auto")
            for _ in range(repetitions)
        ]
        forward_s = watch.lap()
        for layer in layers:
            torch.autograd.grad(layer, inputs, gradient)
        return _both_passes(forward_s, watch.lap(), repetitions)

    return Probe(f"attention {shape}", run)


def _stream(device: torch.device) -> Probe:
    """Elementwise operations whose results are kept, as activations are."""
    rows = torch.randn(4, _STREAM_ELEMENTS, device=device).unbind()

    def run() -> list[Tensor]:
        return [rows[index % 4] + rows[(index + 1) % 4] for index in range(_STREAM_RESULTS)]

    # A sum of two tensors is three passes over the elements.
    return _per_element("stream", run, 3 * _STREAM_RESULTS * _STREAM_ELEMENTS, device)


def _copy(device: torch.device) -> Probe:
    """A copy between two large blocks of memory."""
    source = torch.randn(_COPY_ELEMENTS, device=device)
    target = torch.empty_like(source)
    # A copy is two passes over the elements.
    return _per_element("copy", lambda: target.copy_(source), 2 * _COPY_ELEMENTS, device)


def _call(device: torch.device) -> Probe:
    """A chain of operators on single elements, recorded for backward."""
    one = torch.zeros(1, device=device, requires_grad=True)

    def run(repetitions: int) -> dict[str, float]:
        watch = Stopwatch(device)
        x = one
        for _ in range(repetitions * _CALLS):
            x = x + one
        forward_s = watch.lap()
        torch.autograd.grad(x, one)
        return _both_passes(forward_s, watch.lap(), repetitions * _CALLS)

    return Probe("call", run)


def _optimizer(device: torch.device) -> Probe:
    """A step of fused AdamW."""
    parameters = [
        torch.zeros(_OPTIMIZER_ELEMENTS, device=device, requires_grad=True)
        for _ in range(_OPTIMIZER_TENSORS)
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    optimizer.step()
    num_elements = _OPTIMIZER_TENSORS * _OPTIMIZER_ELEMENTS
    return _per_element("optimizer", optimizer.step, num_elements, device)


def _per_element(
    name: str, part: Callable[[], object], num_elements: int, device: torch.device
) -> Probe:
    def run(repetitions: int) -> dict[str, float]:
        watch = Stopwatch(device)
        for _ in range(repetitions):
            part()
        return {"element_time_s": watch.lap() / (repetitions * num_elements)}

    return Probe(name, run)


def _both_passes(forward_s: float, backward_s: float, count: int) -> dict[str, float]:
    return {"forward_time_s": forward_s / count, "backward_time_s": backward_s / count}


def _require_room(shapes: ComputeShapes) -> None:
    """Raises if the shapes of all ranks would not fit into the machine's memory."""
    num_bytes = sum(
        2 * 4 * (linear.tokens * (linear.inputs + linear.outputs) + linear.inputs * linear.outputs)
        for linear in shapes.linears
    )
    memory_bytes = physical_memory_bytes()
    if memory_bytes is not None and num_bytes * dist.get_world_size() > memory_bytes / 2:
        raise UsageError(
            f"the linear layers to time take {format_binary_bytes(num_bytes)} per rank, more than "
            "half of this machine's memory; calibrate fewer or smaller models or batches"
        )


def _several(rows: int, columns: int, device: torch.device) -> list[Tensor]:
    """Returns equal matrices to rotate through."""
    first = torch.randn(rows, columns, device=device)
    num_copies = min(_MOST_COPIES, 2 + _WEIGHTS_BYTES // first.nbytes)
    return [first, *(first.clone() for _ in range(num_copies - 1))]


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
