"""Measured costs of a group of ranks for the parts of a training step.

Linear layers and attention with shapes that were not measured use the rates of the nearest measured
shapes. Distance is Euclidean in the logarithms of the dimensions.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from paceline.accounting.communication.alpha_beta_fit import CollectiveFit
from paceline.accounting.communication.overlap_simulator import Contention
from paceline.core.collectives import Operation
from paceline.core.errors import UsageError
from paceline.records import CaseValue

_NEIGHBOURS = 3
_FARTHEST = math.log(16)
"""Largest usable distance: a factor of 16 in one dimension, or about 7 in each of two."""

_Cost = TypeVar("_Cost")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """Measured forward and backward time of one shape."""

    dimensions: tuple[int, ...]
    forward_s: float
    backward_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured costs of one topology, i.e. one combination of hardware, ranks and links."""

    topology: Mapping[str, CaseValue]
    """The record case fields that identify the topology."""
    linears: tuple[Timed, ...]
    """Linear layers, by tokens, inputs and outputs."""
    attentions: tuple[Timed, ...]
    """Attention, by sequences, context length, heads, key-value heads and head width."""
    elementwise_s_per_element: float
    """Seconds per element that an elementwise operation reads or writes."""
    copy_s_per_element: float
    """Seconds per element that a copy of large tensors reads or writes."""
    forward_launch_s: float
    """Cost of launching an operator in forward, independent of its size."""
    backward_launch_s: float
    """Cost of launching an operator in backward."""
    optimizer_s_per_parameter: float
    """Seconds to update one parameter."""
    collectives: Mapping[str, CollectiveFit]
    """Cost fit of each collective operation; empty for one rank."""
    contentions: Mapping[str, Contention]
    """Contention of compute with each operation; empty for one rank."""
    attention_implementation: str
    float32_matmul_precision: str
    engine: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Size-independent seconds of a block's pass by layout: plain, tensor, sequence, shard,
    pipeline. Empty for one rank. Calibrations from older versions may lack some layouts."""
    oversubscription: float = 1.0
    """Ratio of threads of all ranks on a machine to its processors; at least 1."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the measurement."""
        return int(str(self.topology["world_size"]))

    def collective(self, operation: Operation) -> CollectiveFit:
        """Returns the cost of an operation as a function of size."""
        return _require(self.collectives, operation)

    def contention(self, operation: Operation) -> Contention:
        """Returns the contention between compute and an operation."""
        return _require(self.contentions, operation)


def linear_work(dimensions: tuple[int, ...]) -> float:
    """Returns the multiplications of a linear layer with these tokens, inputs and outputs."""
    return float(math.prod(dimensions))


def attention_work(dimensions: tuple[int, ...]) -> float:
    """Returns the multiplications for the attention scores of these dimensions."""
    num_sequences, context, num_heads, _, head_dim = dimensions
    return float(num_sequences * context * context * num_heads * head_dim)


def nearest_times(
    timed: Sequence[Timed], dimensions: tuple[int, ...], work: Callable[[tuple[int, ...]], float]
) -> tuple[float, float]:
    """Returns the forward and backward seconds of a shape, measured or from its nearest shapes.

    `work` returns a quantity that the time of a shape is nearly proportional to.
    """
    ranked = sorted(
        ((_distance(entry.dimensions, dimensions), entry) for entry in timed),
        key=lambda pair: pair[0],
    )[:_NEIGHBOURS]
    distance, nearest = ranked[0]
    if distance == 0:
        return nearest.forward_s, nearest.backward_s
    if distance > _FARTHEST:
        raise UsageError(
            f"{_dimensions_text(dimensions)} was not calibrated, nor anything close; the nearest "
            f"is {_dimensions_text(nearest.dimensions)}; run paceline calibrate with this model "
            "and batch into the same store"
        )
    weights = [1 / distance**2 for distance, _ in ranked]

    def seconds(time_of: Callable[[Timed], float]) -> float:
        rates = [time_of(entry) / work(entry.dimensions) for _, entry in ranked]
        logarithms = [weight * math.log(rate) for weight, rate in zip(weights, rates, strict=True)]
        return work(dimensions) * math.exp(sum(logarithms) / sum(weights))

    return seconds(lambda entry: entry.forward_s), seconds(lambda entry: entry.backward_s)


def _distance(first: tuple[int, ...], second: tuple[int, ...]) -> float:
    return math.dist([math.log(value) for value in first], [math.log(value) for value in second])


def _dimensions_text(dimensions: tuple[int, ...]) -> str:
    return " x ".join(str(dimension) for dimension in dimensions)


def _require(costs: Mapping[str, _Cost], operation: Operation) -> _Cost:
    if operation not in costs:
        raise UsageError(f"the calibration has no {operation}; run paceline calibrate again")
    return costs[operation]
