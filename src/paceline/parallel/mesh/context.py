"""Context parallelism: each sequence split over the context ranks.

Of 2c equal parts of a sequence, rank i of c has parts i and 2c - 1 - i: under a causal mask these
attend to (i + 1) + (2c - i) = 2c + 1 parts, equally many on every rank. Every layer all-gathers
keys and values, and each of the two parts of queries attends to the keys up to its own end. This
needs only the usual causal mask, aligned to the last key. Backward reduce-scatters the gradients of
keys and values.

torch's own context-parallel attention passes keys and values around a ring instead. It supports
only GPU attention kernels, so it does not run on CPUs.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from paceline.core.errors import ShapeError
from paceline.core.specs import AttentionImplementation
from paceline.kernels.attention.api import attention

_TOKENS = 3
"""The dimension of tokens in (key or value, batch, heads, sequence, head_dim)."""


class ContextShare:
    """This rank's share of each sequence, and attention from it to the whole sequence."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._num_parts = 2 * mesh.size()
        rank = mesh.get_local_rank()
        self._own = (rank, self._num_parts - 1 - rank)

    def take(self, tokens: Tensor) -> Tensor:
        """Returns this rank's tokens of whole sequences, (batch, sequence)."""
        if tokens.shape[1] % self._num_parts:
            raise ShapeError(
                f"a sequence of {tokens.shape[1]} tokens is not divisible into {self._num_parts} "
                f"parts, two for each of {self._mesh.size()} context ranks"
            )
        parts = tokens.chunk(self._num_parts, dim=1)
        return torch.cat([parts[part] for part in self._own], dim=1)

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Returns the positions of this rank's tokens in their sequence."""
        length = num_tokens // 2
        begins = [part * length for part in self._own]
        return torch.cat([torch.arange(at, at + length, device=device) for at in begins])

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, implementation: AttentionImplementation
    ) -> Tensor:
        """Computes causal attention of this rank's queries to the keys of all ranks.

        Tensors are (batch, heads, tokens of this rank, head_dim).
        """
        length = query.shape[2] // 2
        keys, values = self.put_together(torch.stack((key, value)), dim=_TOKENS)
        mixed = []
        for part, queries in zip(self._own, query.chunk(2, dim=2), strict=True):
            end = (part + 1) * length
            mixed.append(
                attention(
                    queries,
                    keys[:, :, :end],
                    values[:, :, :end],
                    causal=True,
                    causal_align="bottom_right",
                    implementation=implementation,
                )
            )
        return torch.cat(mixed, dim=2)

    def put_together(self, own: Tensor, dim: int) -> Tensor:
        """All-gathers the ranks' parts of a sequence and restores the order of tokens."""
        shared = DTensor.from_local(own, self._mesh, [Shard(dim)], run_check=False)
        gathered = shared.redistribute(placements=[Replicate()])
        # Each rank uses the whole sequence, so a part's gradient is the sum over all ranks.
        parts = gathered.to_local(grad_placements=[Partial()]).chunk(self._num_parts, dim=dim)
        first_halves, second_halves = parts[::2], parts[1::2]
        return torch.cat([*first_halves, *reversed(second_halves)], dim=dim)


def apply_context_parallelism(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes the attention of a model or pipeline stage span the tokens of all context ranks.

    Its `blocks` have an `attention` like that of `TransformerLM`.
    """
    share = ContextShare(mesh)
    for block in model.get_submodule("blocks").children():
        block.get_submodule("attention").share = share  # type: ignore[assignment]
