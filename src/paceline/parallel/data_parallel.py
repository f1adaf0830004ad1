"""The base of all data-parallel containers.

A container holds a module whose copies on all ranks start out equal, sees different data on
each, and averages the gradients, so that the copies stay equal. How the gradients are divided
into messages and when these are sent is all that the containers differ in.

Training loops need not know the container: gradients are right when ``backward()`` returns.
`finish_gradient_synchronization`, which the courses' loops call, finds nothing left to do then.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from paceline.core.errors import UsageError
from paceline.parallel.agreement import broadcast_tensors, require_same_parameters
from paceline.parallel.buckets import plan_buckets, tensor_spec
from paceline.parallel.synchronization import (
    GradientSynchronizer,
    Launch,
    SynchronizationStats,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnusedParameter:
    """A parameter that had no gradient in the last synchronised backward pass."""

    name: str
    ranks: tuple[int, ...]
    """Ranks of the group on which it had none."""


class DataParallel(nn.Module):
    """A module whose gradients are averaged over the ranks of a group.

    Args:
        module: The model, on its final device and in its final dtype. All ranks get the values
            that the group's first rank has, frozen parameters and buffers included.
        cap_bytes: Largest bucket; None for one per dtype, zero for one per parameter.
        launch: When communication starts.
        process_group: The ranks to average over, as a group or a mesh of one dimension; all by
            default.
        reduction_dtype: What gradients are summed and sent in: float32 for sixteen-bit gradients
            whose sum must not lose digits, bfloat16 to send half the bytes of float32 ones. By
            default each in its own.
        broadcast_buffers: Whether the persistent buffers (statistics of batch norm, for example)
            follow the first rank's before every training forward pass. Others, which are not part
            of the state dictionary, are taken over once.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        cap_bytes: float | None,
        launch: Launch,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        reduction_dtype: torch.dtype | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.process_group = _resolve_group(process_group)
        self._cap_bytes = cap_bytes
        self._launch = launch
        self._reduction_dtype = reduction_dtype
        self._synchronizing = True
        self._forward_is_pending = False
        self._all_parameters = list(module.named_parameters())
        self._device = _require_supported(self._all_parameters)
        self._is_trained: list[bool] = []
        self._synchronizer: GradientSynchronizer | None = None
        if self.is_distributed:
            require_same_parameters(self._all_parameters, self.process_group, self._device)
            broadcast_tensors(
                [*(tensor for _, tensor in self._all_parameters), *module.buffers()],
                self.process_group,
            )
            self._build()
        self._state_buffers = persistent_buffers(module) if broadcast_buffers else []
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    @property
    def is_distributed(self) -> bool:
        """Whether there is anyone to average with."""
        return dist.get_world_size(self.process_group) > 1

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the module."""
        if not (self.is_distributed and torch.is_grad_enabled()):
            return self.module(*arguments, **keywords)
        self._follow_changes()
        synchronize = self._synchronizing
        if synchronize and self.training:
            broadcast_tensors(self._state_buffers, self.process_group)
            self._forward_is_pending = True
        output = self.module(*arguments, **keywords)
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda _gradient: self._begin(synchronize)
                )
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps gradients local: what is computed inside is averaged with the next pass outside.

        A pass is left out if its forward or its backward lies inside.
        """
        before = self._synchronizing
        self._synchronizing = False
        try:
            yield
        finally:
            self._synchronizing = before

    def finish_gradient_synchronization(self) -> None:
        """Makes sure that gradients are averaged; does nothing where they are already.

        Backward does this by itself. A rank whose forward pass was not followed by a backward
        pass takes part here, with no gradients of its own.
        """
        if self._synchronizer is None:
            return
        if self._forward_is_pending and not self._synchronizer.in_backward:
            self._begin(synchronize=True)
        self._synchronizer.finish()

    def set_gradient_weight(self, weight: float) -> None:
        """Sets what this rank's next gradients count for, for example its number of tokens.

        Call it on all ranks, before backward. The average over ranks of mean losses is not the
        mean over all tokens where ranks hold different numbers of them; weighted, it is.
        """
        if self._synchronizer is not None:
            self._synchronizer.set_weight(weight)

    def synchronization_stats(self) -> SynchronizationStats | None:
        """Returns sizes and times of the last synchronisation on this rank; None before it."""
        return None if self._synchronizer is None else self._synchronizer.stats()

    def explain_unused(self) -> list[UnusedParameter]:
        """Names the parameters without a gradient in the last synchronised pass, and the ranks.

        All ranks must call it.
        """
        if self._synchronizer is None:
            return []
        missing = torch.tensor(
            [not arrived for arrived in self._synchronizer.arrived],
            dtype=torch.uint8,
            device=self._device,
        )
        gathered = [
            torch.empty_like(missing) for _ in range(dist.get_world_size(self.process_group))
        ]
        dist.all_gather(gathered, missing, group=self.process_group)
        by_parameter = torch.stack(gathered).T.tolist()
        return [
            UnusedParameter(name=name, ranks=tuple(rank for rank, no in enumerate(ranks) if no))
            for (name, _), ranks in zip(self._trained(), by_parameter, strict=True)
            if any(ranks)
        ]

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [
            named
            for named, trained in zip(self._all_parameters, self._is_trained, strict=True)
            if trained
        ]

    def _build(self) -> None:
        """Divides the parameters that are trained now, and watches them."""
        if self._synchronizer is not None:
            self._synchronizer.close()
            self._synchronizer = None  # Before the new buffers are made, the old ones can go.
        self._is_trained = [tensor.requires_grad for _, tensor in self._all_parameters]
        trained = self._trained()
        self._synchronizer = GradientSynchronizer(
            [name for name, _ in trained],
            [parameter for _, parameter in trained],
            plan_buckets([tensor_spec(*named) for named in trained], self._cap_bytes),
            group=self.process_group,
            launch=self._launch,
            reduction_dtype=self._reduction_dtype,
            device=self._device,
        )

    def _follow_changes(self) -> None:
        """Starts anew where parameters were frozen or unfrozen since the last step."""
        if self._is_trained != [tensor.requires_grad for _, tensor in self._all_parameters]:
            require_same_parameters(self._all_parameters, self.process_group, self._device)
            self._build()

    def _begin(self, synchronize: bool) -> None:
        assert self._synchronizer is not None
        self._synchronizer.begin(synchronize=synchronize and self._synchronizing)
        self._forward_is_pending = False


def _resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise UsageError(
            "there is no process group yet; make the container inside of distributed_session()"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(f"a mesh of one dimension is needed, this one has {group.ndim}")
        return group.get_group()
    if group is None:
        group = dist.group.WORLD
    assert group is not None
    return group


def _require_supported(parameters: list[tuple[str, nn.Parameter]]) -> torch.device:
    """Returns the device of the first parameter, after a look at all."""
    for name, parameter in parameters:
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet; run the model once before wrapping it"
            )
        if parameter.is_meta:
            raise UsageError(
                f"parameter {name!r} is on the meta device; give it values before wrapping it"
            )
    if not parameters:
        raise UsageError("the module has no parameters, so there is nothing to synchronise")
    return parameters[0][1].device


def persistent_buffers(module: nn.Module) -> list[Tensor]:
    """Returns the buffers that are part of the module's state."""
    kept = module.state_dict(keep_vars=True)
    return [buffer for name, buffer in module.named_buffers() if name in kept]


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists, dictionaries and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors_in(item)
    elif isinstance(output, dict):
        yield from _tensors_in(list(output.values()))
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from _tensors_in([getattr(output, f.name) for f in dataclasses.fields(output)])


_INNER = "module."


def _without_prefix(
    _container: nn.Module, state: dict[str, Any], prefix: str, _metadata: dict[str, Any]
) -> None:
    """Gives the state dictionary the inner module's names."""
    for name in [name for name in state if name.startswith(prefix + _INNER)]:
        state[prefix + name.removeprefix(prefix + _INNER)] = state.pop(name)


def _with_prefix(_container: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        state[prefix + _INNER + name.removeprefix(prefix)] = state.pop(name)
