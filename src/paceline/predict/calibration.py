"""Measured costs of a group of ranks for the parts of a training step, from `paceline calibrate`.

Linear layers and attention with shapes that were not measured use the rates of the nearest measured
shapes. Distance is Euclidean in the logarithms of the dimensions.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from paceline.accounting.collectives import CollectiveFit, Segment
from paceline.accounting.overlap import Contention
from paceline.core.errors import UsageError
from paceline.core.plan import Estimate
from paceline.core.strategies import Operation
from paceline.records import CaseValue, Metric, Record
from paceline.records.kinds import LINK_SHAPE

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


TOPOLOGY_FIELDS = (
    *("world_size", "num_hosts", "backend", "device", "hardware", "threads"),
    *LINK_SHAPE,
)
"""Case fields shared by a calibration's measurements and the steps that it predicts."""

_LINEAR = ("tokens", "inputs", "outputs")
_ATTENTION = ("batch", "context", "num_heads", "num_kv_heads", "head_dim")
_FIRST = "linear"

_Topology: TypeAlias = tuple[CaseValue, ...]
_ByQuantity: TypeAlias = dict[str, list[Record]]


def calibrations(records: Iterable[Record]) -> list[Calibration]:
    """Builds one calibration per topology. The latest of repeated measurements wins."""
    topologies: dict[_Topology, _ByQuantity] = {}
    for topology, run in _runs(records):
        measured = topologies.setdefault(topology, {})
        for quantity, group in run.items():
            # Shapes from several models accumulate; all other quantities are replaced.
            keeps = measured.get(quantity, []) if quantity in (_FIRST, "attention") else []
            measured[quantity] = [*keeps, *group]
    return [_calibration(topology, measured) for topology, measured in topologies.items()]


def inside_host(known: Iterable[Calibration], outer: Calibration) -> Calibration | None:
    """Returns the calibration of one host's ranks; None for one host, or one rank per host."""
    ranks, hosts = outer.world_size, int(str(outer.topology["num_hosts"]))
    if hosts == 1 or ranks == hosts:
        return None
    wanted = (ranks // hosts, 1, outer.topology["device"])
    for each in known:
        if (each.world_size, each.topology["num_hosts"], each.topology["device"]) == wanted:
            return each
    return None


def calibration_runs(records: Iterable[Record]) -> list[Calibration]:
    """Builds one calibration per calibration run in the records."""
    return [_calibration(topology, measured) for topology, measured in _runs(records)]


def _runs(records: Iterable[Record]) -> list[tuple[_Topology, _ByQuantity]]:
    """Returns each run's records by quantity, ordered by the start of the runs."""
    runs: list[tuple[_Topology, _ByQuantity]] = []
    current: dict[_Topology, _ByQuantity] = {}
    for record in records:
        if record.kind != "calibration" or record.outcome != "ok":
            continue
        topology = tuple(record.case.get(field) for field in TOPOLOGY_FIELDS)
        quantity = str(record.case["quantity"])
        # A run starts with linear layers, so a linear record after other quantities starts a new
        # run.
        if topology not in current or (quantity == _FIRST and current[topology].keys() - {_FIRST}):
            current[topology] = {}
            runs.append((topology, current[topology]))
        current[topology].setdefault(quantity, []).append(record)
    return runs


def _calibration(topology: _Topology, measured: _ByQuantity) -> Calibration:
    try:
        return _from_records(topology, measured)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"a calibration record lacks {error} or has an invalid value; run paceline calibrate "
            "again"
        ) from error


def _from_records(topology: _Topology, measured: _ByQuantity) -> Calibration:
    for quantity in (_FIRST, "attention", "stream", "copy", "call", "optimizer"):
        if quantity not in measured:
            raise UsageError(
                f"a calibration lacks {quantity!r}; run paceline calibrate again until it finishes"
            )

    def value(quantity: str, metric: str = "element_time_s") -> float:
        return measured[quantity][-1].metrics[metric].value

    how = measured["attention"][-1].case
    return Calibration(
        topology=dict(zip(TOPOLOGY_FIELDS, topology, strict=True)),
        linears=_timed(measured[_FIRST], _LINEAR),
        attentions=_timed(measured["attention"], _ATTENTION),
        elementwise_s_per_element=value("stream"),
        copy_s_per_element=value("copy"),
        forward_launch_s=value("call", "forward_time_s"),
        backward_launch_s=value("call", "backward_time_s"),
        optimizer_s_per_parameter=value("optimizer"),
        collectives=_fits(measured.get("collective", [])),
        contentions={
            str(record.case["operation"]): Contention(
                lost_s_per_byte=record.metrics["lost_s_per_byte"].value,
                slowdown=max(1.0, record.metrics["slowdown"].value),
            )
            for record in measured.get("contention", [])
        },
        attention_implementation=str(how["attention"]),
        float32_matmul_precision=str(how["float32_matmul_precision"]),
        engine={
            str(record.case["engine"]): record.metrics["block_time_s"].value
            for record in measured.get("engine", [])
        },
        oversubscription=_oversubscription(measured[_FIRST][-1]),
    )


def _oversubscription(record: Record) -> float:
    """Returns the number of threads per processor of a machine, at least 1."""
    case, processors = record.case, record.environment.num_processors
    # Hosts with shaped links are network namespaces on one machine.
    is_emulated = any(case.get(field) is not None for field in LINK_SHAPE)
    machines = 1 if is_emulated else int(str(case["num_hosts"]))
    threads = int(str(case["world_size"])) / machines * int(str(case["threads"]))
    return max(1.0, threads / processors) if processors else 1.0


def _timed(records: Sequence[Record], fields: Sequence[str]) -> tuple[Timed, ...]:
    timed = {}
    for record in records:
        dimensions = tuple(int(str(record.case[field])) for field in fields)
        timed[dimensions] = Timed(
            dimensions=dimensions,
            forward_s=record.metrics["forward_time_s"].value,
            backward_s=record.metrics["backward_time_s"].value,
        )
    return tuple(timed.values())


def _fits(records: Sequence[Record]) -> dict[str, CollectiveFit]:
    fits: dict[str, CollectiveFit] = {}
    for record in records:
        operation = str(record.case["operation"])
        bandwidth = record.metrics.get("algorithm_bandwidth_bytes_per_s")
        segment = Segment(
            smallest_bytes=float(str(record.case["smallest_bytes"])),
            largest_bytes=float(str(record.case["largest_bytes"])),
            latency_s=_estimate(record.metrics["latency_s"]),
            bytes_per_s=None if bandwidth is None else _estimate(bandwidth),
        )
        before = fits[operation].segments if operation in fits else ()
        # The record of every segment holds the error of the entire fit.
        error = record.metrics["max_relative_error"].value
        fits[operation] = CollectiveFit(segments=(*before, segment), max_relative_error=error)
    return fits


def _estimate(metric: Metric) -> Estimate:
    return Estimate(value=metric.value, low=metric.low, high=metric.high)
