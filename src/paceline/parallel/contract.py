"""The interface of all data-parallel containers, so training loops work with any of them.

A container wraps a module, and each rank feeds it different data. Names of parameters, buffers and
state dictionary entries are the inner module's. A saved state therefore loads with any container or
none, and rules by name ("no decay for biases") apply to all. `_fqn_modifiers` maps the names for
torch.distributed.checkpoint.

`clip_grad_norm_` computes the total norm of gradients that are replicated on all ranks or sharded
over them. Each rank raises its norm to the power of the norm type, and the powers are summed over
ranks in float64. Ranks get bitwise equal results, which differ from a single process by less than
the rounding of the gradients' dtype. Nothing waits for the device, unless a norm that is not finite
is an error.
"""

import abc
import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from paceline.core.errors import UsageError
from paceline.parallel.ranks.collectives import GroupReference
from paceline.parallel.reducer import SyncState
from paceline.parallel.traffic import SynchronizationStats

_INNER = "module"


_MOST_NAMED = 16
"""Maximum number of ranks that are listed, so that traffic does not grow with the world size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnusedParameter:
    """A parameter that had no gradient in the last synchronised backward pass."""

    name: str
    """The parameter's name in the inner module."""
    ranks: tuple[int, ...]
    """The first 16 ranks of the group on which it had no gradient."""
    num_ranks: int
    """Number of all ranks on which it had no gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalGradients:
    """A rank's gradients as plain tensors, divided into replicated and sharded ones."""

    replicated: Sequence[Tensor] = ()
    """Gradients of which every rank holds all elements."""
    sharded: Sequence[Tensor] = ()
    """This rank's shards of gradients that are sharded over a group."""
    shard_group: dist.ProcessGroup | None = None
    """The ranks that hold the other elements; None if nothing is sharded."""


class DataParallelContainer(nn.Module, abc.ABC):
    """A module that the ranks of a group train together.

    Args:
        module: The model.
        group: The ranks that train it.
        device: The device of this rank's gradients.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self._group_reference = GroupReference(group)
        self._device = device
        dtypes = {parameter.dtype.to_real() for parameter in module.parameters()}
        self._norm_dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._sync_state = SyncState()
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group over which gradients are averaged."""
        return self._group_reference.get()

    @property
    def is_distributed(self) -> bool:
        """Whether the group has more than one rank."""
        return dist.get_world_size(self.process_group) > 1

    @abc.abstractmethod
    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the module.

        Args:
            arguments: Positional arguments of the module.
            keywords: Keyword arguments of the module.
        """

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients locally; the next pass outside the context averages them too.

        A pass is not averaged if its forward or its backward runs inside the context.
        """
        before = self._sync_state.synchronize
        self._sync_state.synchronize = False
        try:
            yield
        finally:
            self._sync_state.synchronize = before

    @abc.abstractmethod
    def finish_gradient_synchronization(self) -> None:
        """Ensures that gradients are averaged; does nothing if they already are."""

    def set_gradient_weight(self, weight: float) -> None:
        """Sets this rank's weight in the next average of gradients, such as its number of tokens.

        Call it on all ranks, before backward. If ranks hold different numbers of tokens, only the
        average weighted by token counts equals the mean over all tokens. The gradients of a rank
        with weight zero are ignored, even if they are not finite. If all weights are zero, all
        ranks have equal weight.

        Args:
            weight: The non-negative weight.
        """
        if not weight >= 0:
            raise UsageError(f"a gradient's weight must not be negative, got {weight}")
        if not self.is_distributed:
            return
        # The all-reduce of the weights overlaps with the model's computation.
        total = torch.full((), weight, dtype=torch.float64, device=self._device)
        work = dist.all_reduce(total, group=self.process_group, async_op=True)
        assert work is not None
        self._sync_state.pending_weight = (weight, total, work)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips all gradients to a total norm; returns the norm before clipping.

        All ranks must call it between backward and the step; it returns the same norm on all. The
        norm is not finite if any gradient is not: skip the step in that case.

        Args:
            max_norm: Largest total norm that is not scaled down.
            norm_type: 2 for the Euclidean norm, inf for the largest absolute value.
            error_if_nonfinite: Whether to raise if the norm is not finite. The check waits for the
                device.
        """
        gradients = self._local_gradients()
        if gradients.shard_group is None:
            total = torch.nn.utils.get_total_norm(gradients.replicated, norm_type).to(self._device)
        else:
            total = _norm_over_ranks(gradients, norm_type, self._device, gradients.shard_group)
            total = total.to(self._norm_dtype)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"the norm of order {norm_type:g} of all gradients is {float(total)}, so they "
                "cannot be clipped; skip this step, or pass error_if_nonfinite=False"
            )
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for gradient in (*gradients.replicated, *gradients.sharded):
            alike[gradient.device, gradient.dtype].append(gradient)
        for (device, _), group in alike.items():
            torch._foreach_mul_(group, coefficient.to(device))
        return total

    @abc.abstractmethod
    def _local_gradients(self) -> LocalGradients:
        """Returns this rank's gradients as plain tensors that may be scaled in place."""

    def record_statistics(self, enabled: bool = True) -> None:
        """Turns the recording of timestamps for `synchronization_stats` on or off.

        Args:
            enabled: Whether to record subsequent passes.
        """
        self._sync_state.records_statistics = enabled

    @abc.abstractmethod
    def message_bytes(self) -> list[int]:
        """Returns the size of each gradient message in the last synchronisation."""

    @abc.abstractmethod
    def synchronization_stats(self) -> SynchronizationStats | None:
        """Returns message sizes and times of the last synchronisation on this rank.

        Returns None before the first synchronisation, and if `record_statistics` was not on for it.
        """

    def explain_unused(self) -> list[UnusedParameter]:
        """Returns the parameters without a gradient in the last synchronised pass, with ranks.

        All ranks must call it. The list is empty if no pass was synchronised, for example in a
        group of one rank. Memory per rank is a few numbers per parameter, regardless of the world
        size.
        """
        arrived = self._arrived()
        if not arrived:
            return []
        group = self.process_group
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        missing = torch.tensor([not yes for yes in arrived.values()], device=self._device)
        counts = missing.long()
        dist.all_reduce(counts, group=group)
        ranks = torch.full_like(counts, -1)
        named = []
        for _ in range(min(int(counts.max()), _MOST_NAMED)):
            # Each round finds, for every parameter, the next higher rank without a gradient.
            is_next = missing & (ranks < rank)
            ranks = torch.where(is_next, rank, num_ranks)
            dist.all_reduce(ranks, dist.ReduceOp.MIN, group=group)
            named.append(ranks.tolist())
        by_parameter = zip(arrived, counts.tolist(), *named, strict=True)
        return [
            UnusedParameter(
                name=name, ranks=tuple(one for one in first if one < num_ranks), num_ranks=count
            )
            for name, count, *first in by_parameter
            if count
        ]

    @abc.abstractmethod
    def _arrived(self) -> Mapping[str, bool]:
        """Returns whether each trained parameter had a gradient here in the last averaged pass."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the module's state as full plain tensors, by name; all ranks must call it."""
        return dict(self.state_dict())

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the container, then the inner module's modules under their own names.

        Args:
            memo: Modules that have been yielded already.
            prefix: Prefix of all names.
            remove_duplicate: Whether to yield a module under its first name only.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Returns a submodule by its name in the inner module.

        Args:
            target: The name; empty for the container itself.
        """
        return self.module.get_submodule(target) if target else self

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns the inner module's state, with its names and version metadata.

        Args:
            arguments: As for `torch.nn.Module.state_dict`.
            keywords: As for `torch.nn.Module.state_dict`.
        """
        return self.module.state_dict(*arguments, **keywords)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the state dictionary of a container or a plain module.

        Args:
            state_dict: The state, by the inner module's names.
            strict: Whether to raise on missing or unknown names.
            assign: Whether to replace the current tensors instead of copying into them.
        """
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Returns, for torch.distributed.checkpoint, the names that live in the inner module."""
        inner = self.module
        names = (*inner._modules, *inner._parameters, *inner._buffers, "_extra_state")
        return dict.fromkeys(names, _INNER)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "a data-parallel container cannot be copied or pickled; copy or save its .module"
        )


def _with_prefix(_container: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Adds the inner module's prefix to names when a module around the container is loaded."""
    # Removes all entries before inserting any: an old name may equal another entry's new name.
    taken = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
    inner = f"{prefix}{_INNER}."
    state.update({inner + name.removeprefix(prefix): value for name, value in taken.items()})


def _norm_over_ranks(
    gradients: LocalGradients, norm_type: float, device: torch.device, group: dist.ProcessGroup
) -> Tensor:
    own = _norm(gradients.sharded, norm_type, device)
    of_replicated = _norm(gradients.replicated, norm_type, device)
    if norm_type == float("inf"):
        dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
        return torch.maximum(own, of_replicated)
    powers = own**norm_type
    dist.all_reduce(powers, group=group)
    norm: Tensor = (powers + of_replicated**norm_type) ** (1 / norm_type)
    return norm


def _norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Returns the norm of a rank's own elements, without rounding to bf16 for bf16 gradients."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [
        torch.linalg.vector_norm(
            gradient, norm_type, dtype=torch.promote_types(gradient.dtype, torch.float32)
        ).double()
        for gradient in gradients
    ]
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(device) for norm in norms]), norm_type
    )
    return norm


def require_supported(module: nn.Module) -> torch.device:
    """Returns the device of all parameters; raises if they cannot be synchronised."""
    devices: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet; run the model once before wrapping it"
            )
        if parameter.is_meta:
            raise UsageError(
                f"parameter {name!r} is on the meta device; give it values before wrapping it"
            )
        devices.setdefault(parameter.device, name)
    if not devices:
        raise UsageError("the module has no parameters, so there is nothing to synchronise")
    if len(devices) > 1:
        found = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise UsageError(
            f"a rank has one device, but the module has {found}; use one rank per device"
        )
    return next(iter(devices))


def is_compiled(module: nn.Module) -> bool:
    """Returns whether torch.compile has compiled a module, in place or as a wrapper."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that are part of the module's state, by name."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}
