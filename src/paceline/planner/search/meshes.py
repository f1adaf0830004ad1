"""Enumerates meshes of tensor, context, pipeline and data-parallel ranks that divide the work."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.core.specs import Experts
from paceline.planner.search.question import SearchQuestion


class Mesh(NamedTuple):
    """Sizes of the mesh axes."""

    tensor: int
    context: int
    pipeline: int
    data: int

    @property
    def num_devices(self) -> int:
        """Product of all axes."""
        return self.tensor * self.context * self.pipeline * self.data


def meshes(question: SearchQuestion) -> Iterator[Mesh]:
    """Yields every mesh that divides heads, layers, sequences, batch and devices."""
    least = question.least_used * question.num_devices
    host = question.devices_per_host if question.num_devices >= question.devices_per_host else 1
    for tensor in _sizes(question, "tensor", tensor_sizes(question)):
        for context in _sizes(question, "context", context_sizes(question)):
            for pipeline in _sizes(question, "pipeline", pipeline_sizes(question)):
                for data in _sizes(question, "data_parallel", divisors(question.global_batch)):
                    mesh = Mesh(tensor, context, pipeline, data)
                    used = mesh.num_devices
                    if least <= used <= question.num_devices and used % host == 0:
                        yield mesh


def tensor_sizes(question: SearchQuestion) -> tuple[int, ...]:
    """Returns the tensor-parallel sizes that divide every matrix of the model."""
    shape, experts = question.shape, question.experts
    heads = math.gcd(shape.num_heads, shape.key_value_heads)
    if experts is None:
        return divisors(math.gcd(heads, shape.d_ff))
    return divisors(math.gcd(heads, experts.shared_width, experts.dense_width))


def context_sizes(question: SearchQuestion) -> tuple[int, ...]:
    """Returns the context-parallel sizes that divide a sequence evenly."""
    if not question.shape.num_heads:
        return ()
    length = question.context_length
    return tuple(size for size in divisors(length) if size == 1 or length % (2 * size) == 0)


def pipeline_sizes(question: SearchQuestion) -> tuple[int, ...]:
    """Returns the numbers of pipeline stages that divide the layers evenly."""
    layers = question.shape.num_layers
    return tuple(stages for stages in range(1, layers + 1) if divides_layers(layers, stages))


def divides_layers(num_layers: int, stages: int) -> bool:
    """Whether stages divide the layers, with or without counting embedding and output layer."""
    return num_layers % stages == 0 or (num_layers + 2) % stages == 0


def divisors(number: int) -> tuple[int, ...]:
    """Returns the divisors of a number in ascending order."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(small + [number // each for each in reversed(small) if each * each != number])


def expert_sizes(experts: Experts, mesh: Mesh, sharding: tuple[int, int, int]) -> tuple[int, ...]:
    """Returns the expert-parallel sizes that divide the experts and the ranks of a stage."""
    _, shard, stage = sharding
    ranks = mesh.tensor * mesh.context * (shard if stage else mesh.data)
    return divisors(math.gcd(experts.num_experts, ranks))


def _sizes(question: SearchQuestion, field: str, sizes: Sequence[int]) -> Sequence[int]:
    """Returns the sizes of an axis, or (1,) if there are none, restricted to a fixed value."""
    sizes = sizes or (1,)
    fixed = question.fixed.get(field)
    return sizes if fixed is None else tuple(size for size in sizes if size == fixed)
