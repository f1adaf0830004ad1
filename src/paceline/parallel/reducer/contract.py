"""What every data-parallel container offers, whatever it shards: a loop need not know which it has.

A container holds a module, of which ranks see different data. Names are the inner module's: those
of parameters, of buffers and of state dictionaries, so that what is saved loads with any container
or none, and rules by name ("no decay for biases") hold for all. torch.distributed.checkpoint finds
its way through `_fqn_modifiers`.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.parallel.reducer.backward_pass import SynchronizationStats
from paceline.parallel.reducer.gradient_norm import LocalGradients, clip_gradients
from paceline.parallel.reducer.settings import GroupReference, SyncState

_INNER = "module"
_MOST_NAMED = 16
"""So many ranks without a gradient are named at most: what is exchanged must not grow with them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnusedParameter:
    """A parameter that had no gradient in the last synchronised backward pass."""

    name: str
    """As the module calls it."""
    ranks: tuple[int, ...]
    """Ranks of the group on which it had none, the first 16 of them."""
    num_ranks: int
    """How many there are."""


class DataParallelContainer(nn.Module, abc.ABC):
    """A module that the ranks of a group train together.

    Args:
        module: The model.
        group: The ranks.
        device: Where this rank's gradients are.
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
        """The ranks to average over."""
        return self._group_reference.get()

    @property
    def is_distributed(self) -> bool:
        """Whether there is anyone to average with."""
        return dist.get_world_size(self.process_group) > 1

    @abc.abstractmethod
    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the module.

        Args:
            arguments: As the module takes them.
            keywords: As the module takes them.
        """

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps gradients local: what is computed inside is averaged with the next pass outside.

        A pass is left out if its forward or its backward lies inside.
        """
        before = self._sync_state.synchronize
        self._sync_state.synchronize = False
        try:
            yield
        finally:
            self._sync_state.synchronize = before

    @abc.abstractmethod
    def finish_gradient_synchronization(self) -> None:
        """Makes sure that gradients are averaged; does nothing where they are already."""

    def set_gradient_weight(self, weight: float) -> None:
        """Sets what this rank's next averaged gradients count for, such as its number of tokens.

        Call it on all ranks, before backward. The average over ranks of mean losses is not the
        mean over all tokens where ranks hold different numbers of them; weighted, it is. What a
        rank of weight zero has computed is left out, whatever it is; if all weights are zero, all
        ranks count alike.

        Args:
            weight: Not negative.
        """
        if not weight >= 0:
            raise UsageError(f"a gradient's weight must not be negative, got {weight}")
        if not self.is_distributed:
            return
        # The sum of the weights is in flight while the model computes.
        total = torch.full((), weight, dtype=torch.float64, device=self._device)
        work = dist.all_reduce(total, group=self.process_group, async_op=True)
        assert work is not None
        self._sync_state.pending_weight = (weight, total, work)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales all gradients down to a norm, if theirs is larger; returns theirs.

        All ranks call it, between backward and the step, and get the same number. It is not
        finite if any gradient is not: leave out the step then.

        Args:
            max_norm: The largest norm that is left as it is.
            norm_type: 2 for the Euclidean norm, inf for the largest number.
            error_if_nonfinite: Whether a norm that is not finite is an error. Looking at it waits
                for the device.
        """
        return clip_gradients(
            self._local_gradients(),
            max_norm,
            norm_type,
            self._device,
            dtype=self._norm_dtype,
            error_if_nonfinite=error_if_nonfinite,
        )

    @abc.abstractmethod
    def _local_gradients(self) -> LocalGradients:
        """Returns what gradients this rank holds, as plain tensors that may be scaled in place."""

    def record_statistics(self, enabled: bool = True) -> None:
        """Has the moments of the passes to come kept for `synchronization_stats`, or no longer.

        Args:
            enabled: Whether to keep them.
        """
        self._sync_state.records_statistics = enabled

    @abc.abstractmethod
    def message_bytes(self) -> list[int]:
        """Returns the size of each message of gradients in the last synchronisation."""

    @abc.abstractmethod
    def synchronization_stats(self) -> SynchronizationStats | None:
        """Returns sizes and times of the last synchronisation on this rank.

        None before it, and where nobody has asked to `record_statistics` before.
        """

    def explain_unused(self) -> list[UnusedParameter]:
        """Names the parameters without a gradient in the last synchronised pass, and the ranks.

        All ranks must call it. Where nothing was synchronised, as by one rank, there is nothing to
        name. A rank holds a few numbers per parameter, however many ranks there are.
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
            # Each round finds, of every parameter, the first rank behind the one found before.
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
        """Returns which trained parameters had a gradient in the last synchronised pass here."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the module's state as plain full tensors, by its names; all ranks call it."""
        return dict(self.state_dict())

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the container, and then all modules by the names that they have inside of it.

        Args:
            memo: Modules that were yielded already.
            prefix: What is put before all names.
            remove_duplicate: Whether a module is yielded under its first name only.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Returns a module by the name that it has inside.

        Args:
            target: The name; empty for the container itself.
        """
        return self.module.get_submodule(target) if target else self

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns the inner module's state, by its names and with its versions.

        Args:
            arguments: As `torch.nn.Module` takes them.
            keywords: As `torch.nn.Module` takes them.
        """
        return self.module.state_dict(*arguments, **keywords)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads what a container or a plain module has saved.

        Args:
            state_dict: By the inner module's names.
            strict: Whether a name that is missing or unknown is an error.
            assign: Whether tensors take the place of the present ones.
        """
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint which names lie one level deeper than they say."""
        inner = self.module
        names = (*inner._modules, *inner._parameters, *inner._buffers, "_extra_state")
        return dict.fromkeys(names, _INNER)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "a data-parallel container cannot be copied or pickled; copy or save its .module"
        )


def _with_prefix(_container: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Finds the inner module's state where an outer module that holds a container is loaded."""
    # All are taken out before any is put in: an old name may be another one's new name.
    taken = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
    inner = f"{prefix}{_INNER}."
    state.update({inner + name.removeprefix(prefix): value for name, value in taken.items()})
