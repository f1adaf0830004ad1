"""An optimizer whose state is sharded over ranks (ZeRO-1).

Every rank keeps only the state of its own shards. With plain gradients, or under any container that
averages them on all ranks, one step on every rank has these phases:

1. The options of the groups, which schedulers change, are copied to the inner optimizers.
2. An inner optimizer updates the shards of this rank in place.
3. An all-gather per dtype and device gives all ranks every shard: on gloo as one message per rank,
   on NCCL in place. All are in flight at once, and the step waits for them at its end.

Under `ShardedDataParallel`, which reduce-scatters the gradients, phases 2 and 3 run one bucket at a
time (small buckets are updated together), beginning with those that the next forward pass needs
first. The step does not wait for the all-gathers; the next forward pass does, layer by layer.

ZeRO-1 with all-reduced gradients communicates 1.5 times as much as plain data parallelism: an
all-reduce moves the parameters' size twice, the all-gather once more. Replacing the all-reduce with
a reduce-scatter saves one of the three.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from paceline.core.errors import UsageError
from paceline.parallel.buckets import tensor_spec
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.ranks.collectives import GroupReference, resolve_group
from paceline.parallel.zero.bucket import ShardedParameters, find_sharded_parameters
from paceline.parallel.zero.flat_parameters import (
    FlatParameters,
    Partition,
    Shard,
    choose_partition,
    plan_shards,
)
from paceline.parallel.zero.optimizer_state import (
    gather_full_state,
    load_full_state,
    take_over_options,
)
from paceline.parallel.zero.shard_optimizer import MakeOptimizer, ShardOptimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader

_STEPPED_TOGETHER = 2**17
"""Maximum elements of a rank's shards of several buckets that are updated together."""


class ShardedOptimizer(Optimizer):
    """A torch optimizer with its state sharded over the ranks of a group (ZeRO-1).

    Args:
        params: Parameters or groups, as for the optimizer itself; equal on all ranks, with equal
            values. Parameters of a `ShardedDataParallel` keep the shards of their container.
        optimizer_cls: Class of the optimizer that updates a rank's shards.
        partition: "elements" splits evenly, for elementwise optimizers; "parameters" assigns whole
            parameters to ranks, balanced by size, for any optimizer. By default "elements" for
            torch's elementwise optimizers, otherwise "parameters".
        process_group: The ranks, as a group or a one-dimensional mesh; by default all ranks.
        kwargs: Keyword arguments for the optimizer.
    """

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[Optimizer],
        *,
        partition: str | None = None,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        **kwargs: Any,
    ) -> None:
        _require_step_without_closure(optimizer_cls)
        self.partition = choose_partition(partition, optimizer_cls)
        group = resolve_group(process_group)
        self._group = GroupReference(group)
        self._make: MakeOptimizer = lambda groups: optimizer_cls(groups, **kwargs)
        self._loads = [0] * dist.get_world_size(group)
        self._parts: dict[FlatParameters, ShardOptimizer] = {}
        self._containers: list[ShardedParameters] = []
        self._is_complete = False
        listed = list(params)
        # Creating the optimizer validates the options and provides the defaults.
        defaults = optimizer_cls(listed, **kwargs).defaults
        super().__init__(listed, defaults)
        self._is_complete = True
        self._shard(self.param_groups)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of this rank's shards."""
        merged: defaultdict[Tensor, Any] = defaultdict(dict)
        for part in self.parts:
            if part.inner is not None:
                merged.update(part.inner.state)
        return merged

    @state.setter
    def state(self, value: Any) -> None:
        """Does nothing: the inner optimizers hold the state, but torch's constructor sets it.

        Args:
            value: The empty state that the constructor sets.
        """

    @property
    def parts(self) -> list[ShardOptimizer]:
        """The inner optimizers, in the order in which they step."""
        return list(dict.fromkeys(self._parts.values()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, and shards it over the ranks.

        Args:
            param_group: As for torch's optimizers: params, and options that differ from defaults.
        """
        super().add_param_group(param_group)
        if self._is_complete:
            self._shard(self.param_groups[-1:])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates this rank's shards and sends them; returns the closure's loss.

        Args:
            closure: Recomputes the loss, with gradients.
            kwargs: Keyword arguments for the optimizer's own step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for container in self._containers:
            container.decide_gradients()
        for part in self.parts:
            if part.is_awaited_elsewhere:
                part.take_gradients_set_by_hand()
            part.step(**kwargs)
        for part in self.parts:
            if not part.is_awaited_elsewhere:
                for flat in part.flats:
                    flat.wait()
        take_over_options(self.parts)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters, owned or not, and of the shards.

        Args:
            set_to_none: Whether to drop gradients instead of filling them with zeros.
        """
        with torch._C.DisableTorchFunctionSubclass():  # Gradients are never in flight: do not wait.
            super().zero_grad(set_to_none)
        for container in self._containers:
            container.zero_gradients(set_to_none=set_to_none)
        for part in self.parts:
            if not part.is_awaited_elsewhere:
                for flat in part.flats:
                    flat.zero_gradients(set_to_none=set_to_none)

    def shards(self) -> Iterator[Shard]:
        """Yields this rank's shards."""
        for part in self.parts:
            yield from part.shards

    def gradient_tensors(self) -> list[Tensor]:
        """Returns the gradients of shards that their container has reduce-scattered."""
        for container in self._containers:
            container.decide_gradients()
        return [
            shard.tensor.grad
            for shard in self.shards()
            if not shard.is_whole and shard.tensor.grad is not None
        ]

    def state_tensors(self) -> list[Tensor]:
        """Returns this rank's persistent state, including the master copies of its shards."""
        kept = [flat.master for flat in self._parts if flat.has_master]
        for part in self.parts:
            if part.inner is not None:
                kept += _tensors_in_state(part.inner)
        return kept

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "a ShardedOptimizer cannot be copied or pickled: its state belongs to the shards of "
            "these parameters; create another for the copy's parameters, and load "
            "full_state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the full state on every rank, in torch's format; all ranks must call it.

        torch.distributed.checkpoint's functions for models and optimizers require it. It uses the
        memory that sharding saves: `checkpoint_state` does not, and `full_state_dict` does so on
        one rank only.
        """
        return gather_full_state(self.param_groups, self.parts, on_all_ranks=True)

    def full_state_dict(self) -> dict[str, Any]:
        """Returns the state dictionary of torch's own optimizer; all ranks must call it.

        It is complete and on the CPU on the first rank of the group, and empty on the others. It
        does not include master copies of the parameters.
        """
        return gather_full_state(self.param_groups, self.parts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dictionary of torch's own optimizer; each rank keeps only its shards.

        Args:
            state_dict: The state of all parameters, from `full_state_dict` or torch's optimizer.
        """
        load_full_state(self.param_groups, self.parts, state_dict)

    def checkpoint_state(self, model: nn.Module) -> dict[str, Any]:
        """Returns this rank's part of a checkpoint of torch.distributed.checkpoint.

        Args:
            model: The model of the parameters, which provides their names.
        """
        from paceline.parallel.zero.optimizer_checkpoint import checkpoint_state

        return checkpoint_state(self.param_groups, self.parts, model)

    def load_checkpoint(
        self,
        model: nn.Module,
        reader: "StorageReader",
        prefix: str = "optimizer",
        planner: "LoadPlanner | None" = None,
    ) -> None:
        """Loads the state from a torch.distributed.checkpoint checkpoint; all ranks must call it.

        Args:
            model: As for `checkpoint_state`.
            reader: Reader of the checkpoint, such as a `FileSystemReader`.
            prefix: The key under which `checkpoint_state` was saved.
            planner: The planner that reads non-tensor values; torch's own by default.
        """
        from paceline.parallel.zero.optimizer_checkpoint import load_checkpoint

        group = self._group.get()
        load_checkpoint(self.param_groups, self.parts, model, reader, prefix, group, planner)

    def _shard(self, groups: Sequence[dict[str, Any]]) -> None:
        plain: list[nn.Parameter] = []
        sharded: dict[ShardedParameters, None] = {}
        for parameter in (parameter for group in groups for parameter in group["params"]):
            if hasattr(parameter, "device_mesh"):
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} is a DTensor, already sharded "
                    "over ranks, and so is its optimizer's state; use a plain optimizer"
                )
            if (found := find_sharded_parameters(parameter)) is None:
                plain.append(parameter)
            else:
                sharded[found] = None
        # Frozen and trained parameters use separate buffers, so frozen ones need not be sent.
        for is_trained in (True, False):
            self._shard_plain([p for p in plain if p.requires_grad == is_trained], groups)
        for parameters in sharded:
            self._follow_container(parameters, groups)

    def _shard_plain(
        self, parameters: list[nn.Parameter], groups: Sequence[dict[str, Any]]
    ) -> None:
        names = [
            f"number {index} of shape {tuple(parameter.shape)}"
            for index, parameter in enumerate(parameters)
        ]
        specs = [tensor_spec(parameter) for parameter in parameters]
        rank = dist.get_rank(self._group.get())
        for layout in plan_shards(specs, self._loads, self.partition):
            flat = FlatParameters(layout, parameters, names, rank=rank, partition=self.partition)
            self._parts[flat] = ShardOptimizer([flat], self._group, groups, self._make)

    def _follow_container(
        self, parameters: ShardedParameters, groups: Sequence[dict[str, Any]]
    ) -> None:
        if self.partition is not Partition.ELEMENTS:
            raise UsageError(
                "a ShardedDataParallel splits single parameters over ranks, which works only with "
                "an elementwise optimizer; use another container"
            )
        parameters.attach(self)
        if parameters not in self._containers:
            self._containers.append(parameters)
        known = [flat for flat in parameters.flats if flat in self._parts]
        for part in dict.fromkeys(self._parts[flat] for flat in known):
            part.extend(groups)
        new = [flat for flat in parameters.flats if flat not in self._parts]
        for batch in _batches(new):
            part = ShardOptimizer(
                batch, parameters.group, groups, self._make, is_awaited_elsewhere=True
            )
            self._parts |= dict.fromkeys(batch, part)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Returns the tensors that an optimizer keeps on this rank from step to step."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.state_tensors()
    # torch's ZeroRedundancyOptimizer has its inner optimizer in `optim`.
    return _tensors_in_state(getattr(optimizer, "optim", optimizer))


def _tensors_in_state(optimizer: Optimizer) -> list[Tensor]:
    kept = tree_leaves(list(optimizer.state.values()))
    return [local_tensor(value) for value in kept if isinstance(value, Tensor)]


def _batches(flats: Sequence[FlatParameters]) -> Iterator[list[FlatParameters]]:
    """Groups buckets so small that the overhead of separate steps would exceed their arithmetic.

    Large buckets step one by one, so that the first is sent while the others are updated.
    """
    batch: list[FlatParameters] = []
    num_elements = 0
    for flat in flats:
        num_elements += flat.master.numel()
        if batch and num_elements > _STEPPED_TOGETHER:
            yield batch
            batch, num_elements = [], flat.master.numel()
        batch.append(flat)
    if batch:
        yield batch


def _require_step_without_closure(optimizer_cls: type[Optimizer]) -> None:
    closure = inspect.signature(optimizer_cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{optimizer_cls.__name__} evaluates the loss several times in a step, for which all "
            "parameters would have to be sent each time; it cannot be sharded"
        )
