"""torch's FSDP2, instrumented to report messages and waits like Paceline's containers.

FSDP2 calls its collectives through replaceable objects. This module replaces them with wrappers
around torch's own, which count the calls and optionally time them. On a CPU each call blocks until
its message has arrived, so all the time spent in calls is exposed communication. On a GPU the
collectives run in separate streams, and FSDP2 makes the compute stream wait for them internally,
so the exposed time is unknown.
"""

import itertools
import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from paceline.parallel.reducer import OUTSIDE_BACKWARD, current_pass, tensors_in
from paceline.parallel.traffic import Traffic


class TorchTraffic:
    """Messages and waits of a module that FSDP2 shards."""

    def __init__(self, device: torch.device) -> None:
        self.blocks = device.type == "cpu"
        """Whether a collective call blocks until its message has arrived."""
        self.traffic = Traffic(device)
        self._in_backward = False

    def before_forward(self, *_: object) -> None:
        """Begins a forward pass, before its first all-gather."""
        if current_pass() == OUTSIDE_BACKWARD:  # Otherwise a checkpoint recomputes the forward.
            self._in_backward = False  # An error may have aborted the last backward.
            self.traffic.begin_forward()

    def after_forward(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        """Registers hooks on the output's gradients, before FSDP2 registers its own."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, _gradient: torch.Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            self.traffic.begin_backward()
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.traffic.end_backward()
        # FSDP2 sends its last messages in a callback that is queued before this one.
        Variable._execution_engine.queue_callback(self._complete)

    def _complete(self) -> None:
        self._in_backward = False
        if self.traffic.num_messages:
            self.traffic.complete()


class _CountedAllGather(DefaultAllGather):
    """torch's all-gather of parameters, timed as a wait."""

    def __init__(self, traffic: TorchTraffic) -> None:
        self._traffic = traffic

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if async_op or not self._traffic.blocks:
            self._traffic.traffic.lose_sight_of_waits()
        with self._traffic.traffic.waiting():
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _CountedReduceScatter(DefaultReduceScatter):
    """torch's reduce-scatter of gradients, counted as one message."""

    def __init__(self, traffic: TorchTraffic, num_parameters: int) -> None:
        self._traffic = traffic
        self._num_parameters = num_parameters

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        traffic = self._traffic.traffic
        if async_op or not self._traffic.blocks:
            traffic.lose_sight_of_waits()
        traffic.sent(input_tensor.nbytes, self._num_parameters)
        with traffic.waiting(traffic.num_messages - 1):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


_known: MutableMapping[nn.Module, Traffic] = weakref.WeakKeyDictionary()


def apply_fsdp2(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Shards each block, then the remaining parameters, as FSDP2's documentation recommends."""
    device = next(module.parameters()).device
    if process_group is None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    else:
        mesh = DeviceMesh.from_group(process_group, device.type)
    traffic = TorchTraffic(device)
    # Both hooks run before FSDP2's own: this one is registered first, the other is prepended.
    module.register_forward_hook(traffic.after_forward)
    counted: set[nn.Parameter] = set()
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    for part in [*itertools.chain.from_iterable(lists), module]:
        own = set(part.parameters()) - counted
        fully_shard(part, mesh=mesh)
        counted |= set(part.parameters())
        assert isinstance(part, FSDPModule)
        if own:
            part.set_custom_all_gather(_CountedAllGather(traffic))
            part.set_custom_reduce_scatter(_CountedReduceScatter(traffic, len(own)))
    module.register_forward_pre_hook(traffic.before_forward, prepend=True)
    _known[module] = traffic.traffic
    return module


def traffic_of(module: nn.Module) -> Traffic | None:
    """Returns the recorded traffic of a module sharded by `apply_fsdp2`, None for others."""
    return _known.get(module)
