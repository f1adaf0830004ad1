"""The participants of a step, and sums of their gradients, overlapped with backward.

The buckets are those of `BucketedDataParallel`. A bucket is sent when the last pass of the step has
reached all of its parameters and the buckets before it were sent. Incomplete buckets are sent at
the end, with zeros for missing gradients, so all replicas send the same messages.
"""

import dataclasses
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.buckets import Bucket, plan_buckets, tensor_spec


class ReplicaGradients:
    """The gradients of one replica's parameters."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        add_up: Callable[[Tensor], dist.Work],
        cap_bytes: float | None,
    ) -> None:
        trained = [(name, p) for name, p in named_parameters if p.requires_grad]
        names, parameters = [name for name, _ in trained], [p for _, p in trained]
        plans = plan_buckets([tensor_spec(p) for p in parameters], cap_bytes)
        self._add_up = add_up
        self._buckets = [Bucket(plan, parameters, names, None) for plan in plans]
        self._passes_left: list[dict[int, int]] = []
        """For each bucket, the remaining backward passes of each incomplete parameter."""
        self._works: list[dist.Work] = []
        self._num_passes = 0
        for number, bucket in enumerate(self._buckets):
            for position, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, number=number, position=position: self._reached(number, position)
                )

    def begin(self, num_passes: int) -> None:
        """Prepares for the backward passes of a step."""
        self._num_passes = num_passes
        self._works = []
        self._passes_left = [
            dict.fromkeys(range(len(bucket.parameters)), num_passes) for bucket in self._buckets
        ]

    def finish(self) -> None:
        """Sends the remaining buckets and waits for all sums; `commit` checks their validity."""
        while len(self._works) < len(self._buckets):
            self._send()
        for work in self._works:
            work.wait()
        self._num_passes = 0

    def _reached(self, number: int, position: int) -> None:
        if not self._num_passes:
            return
        left = self._passes_left[number]
        left[position] -= 1
        if not left[position]:
            del left[position]
        while len(self._works) < len(self._buckets) and not self._passes_left[len(self._works)]:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._works)]
        for position, parameter in enumerate(bucket.parameters):
            if parameter.grad is None:
                parameter.grad = parameter.detach().new_zeros(parameter.shape)
            bucket.keep(position)
        self._works.append(self._add_up(bucket.buffer))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Members:
    """The participants of a step."""

    rank: int
    """Index of this replica among the participants."""
    live: int
    """Number of participants."""
    has_healed: bool
    """Whether this replica has just received the state of another."""
