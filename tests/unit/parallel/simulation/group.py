"""A process group of threads whose collectives are messages on a simulated device."""

import contextlib
import datetime
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg

from paceline.devices import accelerator
from paceline.parallel.ranks import collectives
from tests.unit.parallel.simulation.device import Device, SimulatedWork
from tests.unit.parallel.simulation.scheduler import Scheduler

_BACKEND = "simulated"
_REDUCE: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0),
    dist.ReduceOp.AVG: lambda stacked: stacked.mean(0),
    dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
    dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
}
_current: list[Device] = []


class SimulatedGroup(dist.ProcessGroup):
    """One rank's view of a group."""

    def __init__(self, rank: int, size: int, device: Device) -> None:
        super().__init__(rank, size)
        self._own_rank = rank
        self._size = size
        self._device = device

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._own_rank

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    @functools.cached_property
    def _name(self) -> str:
        return self.pg_name

    @functools.cached_property
    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self)

    def getBackendName(self) -> str:
        return _BACKEND

    def _get_backend(self, _device: torch.device) -> Any:
        options = types.SimpleNamespace(_timeout=datetime.timedelta(seconds=60))
        return types.SimpleNamespace(options=options)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> SimulatedWork:
        reduce = _reduction(options)

        def combine(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            total = [reduce(torch.stack(of_all)) for of_all in zip(*sent, strict=True)]
            return [total] * self._size

        return self._launch("all-reduce", tensors, tensors, combine)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> SimulatedWork:
        root = options.rootRank
        outputs = [] if self._own_rank == root else tensors
        return self._launch("broadcast", tensors, outputs, lambda sent: [sent[root]] * self._size)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], _options: Any = None
    ) -> SimulatedWork:
        return self._launch(
            "all-gather",
            inputs,
            outputs[0],
            lambda sent: [[one for (one,) in sent]] * self._size,
            named_by=outputs[0],
        )

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, _options: Any = None
    ) -> SimulatedWork:
        rows = list(output.view(self._size, -1).unbind())
        own = rows[self._own_rank]
        is_in_place = own.data_ptr() == tensor.data_ptr()

        def combine(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            of_all = [one for (one,) in sent]
            return [of_all[:rank] + of_all[rank + is_in_place :] for rank in range(self._size)]

        return self._launch("all-gather", [tensor], rows, combine, own=own if is_in_place else None)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, options: Any = None
    ) -> SimulatedWork:
        reduce = _reduction(options)

        def combine(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            total = reduce(torch.stack([one for (one,) in sent])).view(self._size, -1)
            return [[row] for row in total]

        return self._launch("reduce-scatter", [tensor], [output], combine)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, _out: Any = None, _in: Any = None, _o: Any = None
    ) -> SimulatedWork:
        def combine(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            rows = torch.stack([one.reshape(self._size, -1) for (one,) in sent])
            return [[rows[:, rank]] for rank in range(self._size)]

        return self._launch("all-to-all", [tensor], [output], combine)

    def barrier(self, _options: Any = None) -> SimulatedWork:
        return self.allreduce([torch.zeros(1)])

    # Names used by torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _launch(
        self,
        kind: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        combine: Callable[[list[list[Tensor]]], list[list[Tensor]]],
        own: Tensor | None = None,
        named_by: list[Tensor] | None = None,
    ) -> SimulatedWork:
        ranks = dist.get_process_group_ranks(self)
        with torch.no_grad():
            return self._device.launch(
                self.pg_name,
                ranks,
                kind,
                inputs=inputs,
                outputs=outputs,
                combine=combine,
                own=own,
                named_by=named_by,
            )


def _reduction(options: Any) -> Callable[[Tensor], Tensor]:
    if options is None:
        return _REDUCE[dist.ReduceOp.SUM]
    # `reduceOp` of options has another type than the keys: it is equal but hashes differently.
    return next(reduce for name, reduce in _REDUCE.items() if options.reduceOp == name)


def _create(_store: object, rank: int, size: int, _timeout: object) -> SimulatedGroup:
    return SimulatedGroup(rank, size, _current[-1])


dist.Backend.register_backend(_BACKEND, _create, devices=["cpu"])


def _always(_device: torch.device) -> bool:
    return True


@contextlib.contextmanager
def simulated_ranks(num_ranks: int) -> Iterator[tuple[Scheduler, Device]]:
    """Runs ranks as threads of this process that communicate over a simulated device."""
    store = dist.HashStore()
    scheduler = Scheduler(num_ranks)
    device = Device(scheduler)

    def join(rank: int) -> None:
        device.serve(rank)
        dist.init_process_group(_BACKEND, rank=rank, world_size=num_ranks, store=store)

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _current.append(device)
    try:
        with (
            mock.patch.object(collectives, "works_in_place", _always),
            mock.patch.object(accelerator, "current_stream", device.current_stream),
        ):
            scheduler.run(join, seed=0)
            yield scheduler, device
            scheduler.run(lambda _rank: dist.destroy_process_group(), seed=0)
    finally:
        scheduler.close()
        _current.pop()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
