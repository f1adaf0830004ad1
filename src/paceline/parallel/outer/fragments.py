"""The numbers of this rank that belong to a fragment, in one vector, and back into the parameters.

Ranks of a site that shard a parameter exchange their shards as they are. A parameter that the ranks
of a site replicate is divided among them: each exchanges a piece with its counterparts in the other
sites, and the ranks of the site gather the result, so that the slow link carries every number once.

A vector begins with the shards, and the piece begins with a block of its own. Ranks with different
shards therefore pack what they replicate alike, and end with the same bits of it.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.core.errors import UsageError
from paceline.parallel.compression.codec import BLOCK
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.ranks.collectives import start_all_gather
from paceline.parallel.zero.bucket import find_sharded_parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedParameter:
    """A trained parameter, as this rank holds it."""

    name: str
    num_elements: int
    """Number of elements of the whole parameter."""
    num_local: int
    """Number of elements that this rank holds."""
    is_sharded: bool
    """Whether the other ranks of the site hold other elements."""
    dtype: torch.dtype


def trained_parameters(model: nn.Module) -> list[TrainedParameter]:
    """Returns the trained parameters of a model; raises if there is one that cannot be sent."""
    found = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not parameter.is_floating_point():
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype}; only real floating-point parameters can "
                "be averaged over sites"
            )
        sharded = find_sharded_parameters(parameter)
        if sharded is not None and any(flat.has_master for flat in sharded.flats):
            raise UsageError(
                f"parameter {name!r} follows a master copy of other precision, which outer updates "
                "would round; keep the parameters in float32 and use autocast, without compression "
                "inside a site"
            )
        found.append(
            TrainedParameter(
                name=name,
                num_elements=parameter.numel(),
                num_local=local_tensor(parameter).numel(),
                is_sharded=_is_sharded(name, parameter),
                dtype=parameter.dtype,
            )
        )
    if not found:
        raise UsageError("the model has no trained parameters, so sites have nothing to average")
    return found


def _is_sharded(name: str, parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    shards = [placement.is_shard() for placement in parameter.placements]
    if all(shards):
        return True
    if all(placement.is_replicate() for placement in parameter.placements):
        return False
    raise UsageError(
        f"parameter {name!r} is both sharded and replicated inside a site "
        f"({parameter.placements}), which the outer loop does not divide; shard it along one mesh "
        "dimension"
    )


class Fragment:
    """The place of each parameter's elements in the vector of a fragment.

    Args:
        parameters: The parameters of the fragment.
        num_replicas: Ranks among which replicated parameters are divided.
        replica: This rank's number among them.
        device: The device of the parameters.
    """

    def __init__(
        self,
        parameters: Sequence[TrainedParameter],
        *,
        num_replicas: int,
        replica: int,
        device: torch.device,
    ) -> None:
        self._shards = _in_a_row([each for each in parameters if each.is_sharded])
        self._replicated = _in_a_row([each for each in parameters if not each.is_sharded])
        num_sharded = self._shards[-1][1].stop if self._shards else 0
        num_replicated = self._replicated[-1][1].stop if self._replicated else 0
        self._begin = -(-num_sharded // BLOCK) * BLOCK if self._replicated else num_sharded
        """Where the piece of the replicated parameters begins in the vector."""
        piece = num_replicated
        if num_replicas > 1:
            piece = -(-num_replicated // (BLOCK * num_replicas)) * BLOCK
        self._own = range(replica * piece, (replica + 1) * piece)
        """The replicated elements that this rank exchanges."""
        self._borders = range(0, num_replicas * piece + 1, piece) if piece else range(1)
        self._device = device
        self.length = self._begin + piece
        """Number of elements of the vector, with padding."""
        is_wide = any(each.dtype == torch.float64 for each in parameters)
        self.dtype = torch.float64 if is_wide else torch.float32

    def read(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Returns this rank's vector, with zeros as padding.

        Args:
            parameters: All parameters by name.
        """
        vector = torch.zeros(self.length, dtype=self.dtype, device=self._device)
        for name, place in self._shards:
            vector[place.start : place.stop] = _flat(parameters[name])
        own, piece = self._own, vector[self._begin :]
        for name, place in self._replicated:
            first, last = max(place.start, own.start), min(place.stop, own.stop)
            if first < last:
                part = _flat(parameters[name])[first - place.start : last - place.start]
                piece[first - own.start : last - own.start] = part
        return vector

    def write(
        self,
        vector: Tensor,
        parameters: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
        *,
        adds: bool,
    ) -> None:
        """Sets the parameters to the ranks' vectors, or adds these.

        Args:
            vector: This rank's vector.
            parameters: All parameters by name.
            group: The ranks among which replicated parameters are divided; None for one rank. All
                of them call this.
            adds: Whether to add instead of to overwrite.
        """
        for name, place in self._shards:
            _put(vector[place.start : place.stop], parameters[name], adds=adds)
        whole = vector[self._begin :]
        if group is not None and self._own:
            whole = vector.new_empty(self._borders[-1])
            whole[self._own.start : self._own.stop] = vector[self._begin :]
            start_all_gather(whole, self._borders, group).wait()
        for name, place in self._replicated:
            _put(whole[place.start : place.stop], parameters[name], adds=adds)


def _in_a_row(parameters: Sequence[TrainedParameter]) -> list[tuple[str, range]]:
    """Returns the names of parameters, and the place of each one's elements in a row of all."""
    ends = list(itertools.accumulate((each.num_local for each in parameters), initial=0))
    pairs = itertools.pairwise(ends)
    return [(each.name, range(*place)) for each, place in zip(parameters, pairs, strict=True)]


def _flat(parameter: Tensor) -> Tensor:
    return local_tensor(parameter).detach().reshape(-1)


def _put(values: Tensor, parameter: Tensor, *, adds: bool) -> None:
    """Writes a part of a vector to a parameter, which is rounded once to its dtype."""
    local = local_tensor(parameter)
    values = values.view(local.shape)
    if not adds:
        local.copy_(values)
    elif local.dtype == values.dtype:
        local.add_(values)
    else:
        local.copy_(local.to(values.dtype).add_(values))
