"""Cost of collectives on a cluster with tiered links: host, pod, whole cluster.

The devices of one host have consecutive numbers, as have the hosts of one pod. A group of g ranks
has a stride k, the product of the mesh axes inside its own axis. It is split over the tiers as
follows: a domain of D devices holds blocks of gcd(D / k, g) of its ranks if k divides D, and blocks
of one otherwise. Blocks of this size never cross a domain boundary, wherever the group starts. The
group spans the tiers in which its blocks grow. The algorithms are

    ring           one ring, at the speed of the slowest tier that the group spans
    tree           two complementary trees at that speed, all-reduce only
    hierarchical   one ring per tier over the blocks of the tier below, each with the bytes that
                   the tiers below leave: S, then S over the ranks below, and so on

`collective_time_s` takes the fastest of the three for each group, as communication libraries do.
All functions accept arrays of sizes, groups and strides.
"""

import dataclasses
from typing import Any

import numpy as np

from paceline.accounting.communication.collectives import (
    Numbers,
    ring_time_s,
    tree_all_reduce_time_s,
)
from paceline.core.collectives import Operation
from paceline.core.errors import UsageError
from paceline.planner.cost.layouts import Integers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """A level of the network whose devices communicate at the same bandwidth and latency."""

    name: str
    """Name of the domain, such as host or pod."""
    num_devices: int | None
    """Number of devices in one domain; None for the outermost tier, which contains all."""
    latency_s: float
    """Latency of one hop."""
    bytes_per_s: float
    """Bandwidth of one device in one direction while all devices of its domain communicate."""

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0:
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
