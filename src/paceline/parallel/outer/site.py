"""The groups of a rank: its counterparts in the other sites, and the ranks of its own site."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import PacelineError, UsageError
from paceline.parallel.contract import DataParallelContainer
from paceline.parallel.ranks.collectives import (
    GroupReference,
    from_all,
    host_side_device,
    reduce_numbers,
    resolve_group,
)
from paceline.parallel.same_model import DisagreementError, first_difference


class Site:
    """What this rank has to agree on with others.

    Args:
        across: The ranks of the same place in each site, as a group or a one-dimensional mesh.
        inside: The ranks of this site; None if it has one, or if each exchanges all that it holds.
        device: The device of the parameters.
    """

    def __init__(
        self,
        across: dist.ProcessGroup | DeviceMesh,
        inside: dist.ProcessGroup | DeviceMesh | None,
        device: torch.device,
    ) -> None:
        self._across = GroupReference(resolve_group(across))
        self._inside = None if inside is None else GroupReference(resolve_group(inside))
        self._device = device
        self.num_sites = dist.get_world_size(self.across)
        """Number of sites."""
        self.number = dist.get_rank(self.across)
        """This site's number."""
        self.num_replicas = 1 if self.inside is None else dist.get_world_size(self.inside)
        """Ranks among which replicated parameters are divided."""
        self.replica = 0 if self.inside is None else dist.get_rank(self.inside)
        """This rank's number among them."""

    @property
    def across(self) -> dist.ProcessGroup:
        """The ranks of the same place in each site."""
        return self._across.get()

    @property
    def inside(self) -> dist.ProcessGroup | None:
        """The ranks of this site, if they divide what they replicate."""
        return None if self._inside is None else self._inside.get()

    def require_inside(self, model: nn.Module) -> None:
        """Raises if a model is trained or sharded over ranks of several sites."""
        own = {dist.get_rank()}
        others = set(dist.get_process_group_ranks(self.across)) - own
        inside = None if self.inside is None else set(dist.get_process_group_ranks(self.inside))
        if inside is not None and inside & others:
            raise UsageError(
                "inner_group has ranks of other sites; give it the ranks of one site, and group "
                "one rank of each"
            )
        for what, ranks in _ranks_of(model):
            if others & ranks:
                raise UsageError(
                    f"{what} spans ranks {sorted(ranks)}, of several sites; wrap the model over "
                    "the ranks of its site: process_group=..."
                )
            if inside is not None and ranks != inside:
                raise UsageError(
                    f"{what} spans ranks {sorted(ranks)}, and inner_group ranks {sorted(inside)}; "
                    "give inner_group all ranks that train the model of a site"
                )

    def require_same(self, lines: Sequence[str]) -> None:
        """Raises on all ranks unless all sites have the same lines."""
        error = None
        found = first_difference(list(lines), self.across, self._device)
        if found is not None:
            error = DisagreementError(
                f"the sites differ: rank {found.reference} has {found.expected}, where rank "
                f"{found.culprit} has {found.found}; give all sites the same model and settings"
            )
        self.raise_together(error)

    def raise_together(self, error: PacelineError | None) -> None:
        """Raises an error of any rank of this site on all of them."""
        if not self.any(error is not None):
            return
        for found in [error] if self.inside is None else from_all(error, self.inside):
            if found is not None:
                raise found

    def any(self, is_so: bool) -> bool:
        """Returns whether something is so on any rank of this site."""
        if self.inside is None:
            return is_so
        device = host_side_device(self.inside)
        (most,) = reduce_numbers([float(is_so)], dist.ReduceOp.MAX, device, self.inside)
        return most > 0


def _ranks_of(model: nn.Module) -> Iterator[tuple[str, set[int]]]:
    """Yields the parts of a model that belong to a group, by a description, and their ranks."""
    for name, module in model.named_modules():
        if isinstance(module, DataParallelContainer | DistributedDataParallel):
            group = module.process_group
            yield f"{type(module).__name__} {name!r}", _set(dist.get_process_group_ranks(group))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield f"parameter {name!r}", _set(parameter.device_mesh.mesh.flatten().tolist())


def _set(ranks: Iterable[int]) -> set[int]:
    return set(ranks)
