"""Achieved rates of devices and links, and the cost of collectives on tiered links.

A cluster requires three constants: the matmul rate, the memory bandwidth and the links. Every other
constant belongs to a term that is off by default. Vendors do not state these constants, so only a
calibration (`paceline.planner.calibrations`) enables them. A constant may also be a column, an
array of shape (points, 1): then the times of all layouts have one row per point.

Links are tiers: host, pod, whole cluster. The devices of one host have consecutive numbers, as have
the hosts of one pod. A group of g ranks has a stride k, the product of the mesh axes inside its own
axis. A domain of D devices holds blocks of gcd(D / k, g) of its ranks if k divides D, and blocks of
one otherwise. Blocks of this size never cross a domain boundary, wherever the group starts. The
group spans the tiers in which its blocks grow. For each group the fastest algorithm counts, as in
communication libraries:

    ring           one ring, at the speed of the slowest tier that the group spans
    tree           two complementary trees at that speed, all-reduce only
    hierarchical   one ring per tier over the blocks of the tier below, each with the bytes that
                   the tiers below leave: S, then S over the ranks below, and so on

Corrections come from measured runs: libraries select kernels by matmul size, and hosts differ in
launch speed, which causes jumps that the smooth formulas miss. A cell spans half a doubling of
tokens per pass, half a doubling of width and one power of two of tensor ranks. The mean log ratio
of measured to predicted seconds in it, shrunk towards zero, gives a factor on the time of a layer,
exp(sum of logarithms / (runs + 2)), which is 1 without runs.
"""

import dataclasses
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.accounting.collectives import Numbers, ring_time_s, tree_all_reduce_time_s
from paceline.core.errors import UsageError
from paceline.core.strategies import Operation
from paceline.predict.cost.layouts import Integers

Constant: TypeAlias = float | npt.NDArray[np.float64]
"""A number, or a column with one number per point."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """A level of the network whose devices communicate at the same bandwidth and latency."""

    name: str
    """Name of the domain, such as host or pod."""
    num_devices: int | None
    """Number of devices in one domain; None for the outermost tier, which contains all."""
    latency_s: Constant
    """Latency of one hop."""
    bytes_per_s: Constant
    """Bandwidth of one device in one direction while all devices of its domain communicate."""

    def __post_init__(self) -> None:
        if np.min(self.bytes_per_s) <= 0 or np.min(self.latency_s) < 0:
            raise UsageError(
                f"tier {self.name!r} has {self.bytes_per_s} bytes/s and a latency of "
                f"{self.latency_s} s; give a positive bandwidth and a latency of 0 or more"
            )


@dataclasses.dataclass(frozen=True)
class Tiers:
    """The tiers of a cluster, innermost first."""

    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        if not self.tiers or self.tiers[-1].num_devices is not None:
            raise UsageError("the last tier must have num_devices=None: it contains every device")
        below = 1
        for tier in self.tiers[:-1]:
            if tier.num_devices is None or tier.num_devices < below or tier.num_devices % below:
                raise UsageError(
                    f"tier {tier.name!r} has {tier.num_devices} devices; it must be a multiple of "
                    f"{below}, the devices of the tier inside it"
                )
            below = tier.num_devices

    def span(self, group: Any, stride: Any = 1) -> "Span":
        """Returns the mapping of groups of `group` ranks, `stride` apart, to the tiers."""
        remaining, step = np.broadcast_arrays(
            np.asarray(group, dtype=np.int64), np.asarray(stride, dtype=np.int64)
        )
        ranks = remaining
        blocks: list[Integers] = []
        latency: Any = 0.0
        bytes_per_s: Any = np.inf
        for tier in self.tiers:
            block = remaining
            if tier.num_devices is not None:
                steps, left_over = np.divmod(tier.num_devices, step)
                block = np.where(left_over == 0, np.gcd(steps, remaining), 1)
            blocks.append(block)
            is_spanned = block > 1
            latency = np.maximum(latency, np.where(is_spanned, tier.latency_s, 0.0))
            bytes_per_s = np.minimum(bytes_per_s, np.where(is_spanned, tier.bytes_per_s, np.inf))
            remaining, step = remaining // block, step * block
        return Span(
            tiers=self.tiers,
            ranks=ranks,
            blocks=tuple(blocks),
            latency_s=latency,
            bytes_per_s=bytes_per_s,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Mapping of groups of ranks to the tiers, as arrays shaped like the groups'."""

    tiers: tuple[Tier, ...]
    ranks: Integers
    blocks: tuple[Integers, ...]
    """For each tier, the number of blocks of the tier below in one of its blocks."""
    latency_s: Any
    """Largest latency of the tiers that a group spans; 0 for a single rank."""
    bytes_per_s: Any
    """Lowest bandwidth of the tiers that a group spans; infinite for a single rank."""


def send_time_s(span: Span, size_bytes: Numbers) -> Any:
    """Returns the seconds of a message between the two ranks of a group; 0 for single ranks."""
    return span.latency_s + np.asarray(size_bytes) / span.bytes_per_s


def flat_ring_time_s(operation: Operation, span: Span, size_bytes: Numbers) -> Any:
    """Returns the seconds of a collective on one ring over all tiers that the group spans."""
    return ring_time_s(
        operation, size_bytes, span.ranks, latency_s=span.latency_s, bytes_per_s=span.bytes_per_s
    )


def flat_tree_time_s(span: Span, size_bytes: Numbers) -> Any:
    """Returns the seconds of an all-reduce on two trees over all tiers that the group spans."""
    return tree_all_reduce_time_s(
        size_bytes, span.ranks, latency_s=span.latency_s, bytes_per_s=span.bytes_per_s
    )


def hierarchical_time_s(operation: Operation, span: Span, size_bytes: Numbers) -> Any:
    """Returns the seconds of an all-reduce, all-gather or reduce-scatter, tier by tier."""
    total: Any = 0.0
    left = np.asarray(size_bytes, dtype=np.float64)
    for tier, block in zip(span.tiers, span.blocks, strict=True):
        total = total + ring_time_s(
            operation, left, block, latency_s=tier.latency_s, bytes_per_s=tier.bytes_per_s
        )
        left = left / block
    return total


def collective_time_s(operation: Operation, span: Span, size_bytes: Numbers) -> Any:
    """Returns the seconds of the fastest algorithm for each group."""
    cheapest = np.minimum(
        flat_ring_time_s(operation, span, size_bytes),
        hierarchical_time_s(operation, span, size_bytes),
    )
    if operation == "all_reduce":
        return np.minimum(cheapest, flat_tree_time_s(span, size_bytes))
    return cheapest


_STEPS_PER_DOUBLING = 2
_SHRINKAGE = 2.0
_TOKENS, _WIDTHS, _RANKS = 48, 36, 10
"""Number of cells along each axis: up to about 2^23 tokens, width 2^17 and 512 tensor ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCorrections:
    """Log factors of all cells with measured runs."""

    entries: tuple[tuple[int, float], ...]
    """Pairs of a cell's index and its log factor."""

    @classmethod
    def of(
        cls, cells: npt.NDArray[np.int64], ratios: npt.NDArray[np.float64]
    ) -> "MeasuredCorrections":
        """Returns the shrunk mean of the log ratios in every cell."""
        found = []
        for cell in np.unique(cells):
            inside = ratios[cells == cell]
            found.append((int(cell), round(float(inside.sum() / (len(inside) + _SHRINKAGE)), 5)))
        return cls(entries=tuple(found))

    def factor(self, tokens: Any, width: Any, tensor: Any) -> Any:
        """Returns the factors of layers with these tokens, widths and tensor ranks."""
        table = np.ones(_TOKENS * _WIDTHS * _RANKS)
        for cell, logarithm in self.entries:
            table[cell] = np.exp(logarithm)
        return table[cell_of(tokens, width, tensor)]


def cell_of(tokens: Any, width: Any, tensor: Any) -> npt.NDArray[np.int64]:
    """Returns the cell index of each layout."""

    def place(value: Any, size: int, steps: int) -> Any:
        index = np.rint(steps * np.log2(np.asarray(value, dtype=np.float64))).astype(np.int64)
        return np.clip(index, 0, size - 1)

    rows = place(tokens, _TOKENS, _STEPS_PER_DOUBLING)
    columns = place(width, _WIDTHS, _STEPS_PER_DOUBLING)
    return np.asarray((rows * _WIDTHS + columns) * _RANKS + place(tensor, _RANKS, 1))


class Engine(NamedTuple):
    """Size-independent overhead of torch's engine. On CPUs nothing hides it."""

    block_s: float = 0.0
    """Seconds per block and pass, beyond its launches."""
    tensor_block_s: float = 0.0
    """Extra seconds per block and pass on tensor ranks: DTensor dispatch and the latency of their
    collectives."""
    sequence_block_s: float = 0.0
    """Same as `tensor_block_s`, with sequence parallelism."""
    collective_s: float = 0.0
    """Seconds per FSDP2 collective, beyond its transfer time."""
    stage_s: float = 0.0
    """Seconds per pass through a pipeline stage, beyond its blocks: the schedule, and a message to
    each neighbour."""


NO_ENGINE = Engine()
_RATES = ("flops_per_s", "memory_bytes_per_s", "attention_flops_per_s", "update_bytes_per_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Achieved rates of devices and links, measured or stated."""

    flops_per_s: Constant
    """Matmul rate of one device on the model's weight matrices."""
    memory_bytes_per_s: Constant
    """Bandwidth of one device in memory-bound kernels."""
    tiers: Tiers
    launch_s: Constant = 0.0
    """Seconds per kernel launch that the preceding kernel does not hide."""
    dispatch_s: Constant = 0.0
    """Host seconds to launch one kernel. A layer is never faster than its launches."""
    attention_flops_per_s: Constant | None = None
    """Rate of one device in the matmuls inside attention; None to use `flops_per_s`."""
    matmul_tokens: Constant = 0.0
    """Tokens per pass at which a matmul reaches half of its rate."""
    matmul_width: Constant = 0.0
    """Matrix width, after tensor parallelism, at which a matmul reaches half of its rate."""
    misaligned: Constant = 0.0
    """Relative slowdown of a matmul whose width is not a multiple of 128 elements."""
    exposed_share: Constant = 0.0
    """Fraction of data-parallel communication that is exposed regardless of the pass length."""
    contention: Constant = 0.0
    """Relative slowdown of data-parallel traffic per doubling of the number of hosts."""
    expert_kernels: Constant = 0.0
    """Kernels that each local expert launches beside its matmuls, relative to one per matmul."""
    expert_overlap: Constant = 0.0
    """Fraction of a layer's work that hides the all-to-alls of an interleaved pipeline."""
    step_s: Constant = 0.0
    """Fixed seconds per step: data loading, logging, launches of the optimizer."""
    slowdown: Constant = 1.0
    """Factor on the time of a step: what a framework takes beyond all terms."""
    update_bytes_per_s: float | None = None
    """Bandwidth of one device in the optimizer step; None to use `memory_bytes_per_s`."""
    engine: Engine = NO_ENGINE
    oversubscription: float = 1.0
    """Number of ranks that share a processor. While one waits, another can use it alone."""
    cells: MeasuredCorrections | None = None
    """Correction factors from measured runs of the same sizes."""

    def __post_init__(self) -> None:
        for field in _RATES:
            value = getattr(self, field)
            if value is not None and np.min(value) <= 0:
                raise UsageError(f"Cluster.{field} is {value}; it must be positive")
        if np.min(self.slowdown) <= 0:
            raise UsageError(f"Cluster.slowdown is {self.slowdown}; it must be positive")
        if self.oversubscription < 1:
            raise UsageError(
                f"Cluster.oversubscription is {self.oversubscription}; it must be 1 or more"
            )
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.default == 0.0 and np.min(value) < 0:
                raise UsageError(f"Cluster.{each.name} is {value}; it must be 0 or more")
