"""One exchange of a fragment between sites: a verified average, and the outer update that it makes.

Each site owns one piece of the fragment's vector, a whole number of blocks. An exchange has four
messages, each of which all sites send before any uses what it has received:

1. Headers, which are compared before anything is packed.
2. Out: every site packs the numbers of each piece for its owner (all-to-all). The owner adds the
   rows of all sites in float32, in the order of the sites, and divides by their number.
3. Back: every owner packs its averages, and all sites gather the rows of all owners. Everybody,
   the owner included, uses the unpacked numbers.
4. Verdicts: whether a message arrived damaged, and a hash of the parameters and of the momentum
   that the site is about to have.

With codes of 8 or 4 bits, what either message leaves out is added to the next one of the same
fragment (error feedback). An exchange computes new tensors beside the old ones, which are replaced
only if all sites agree. A refused exchange therefore changes nothing.

It runs in a thread (on an accelerator, in a stream of its own), while the inner optimizer goes on.
"""

import dataclasses
import time

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.parallel.compression.codec import BLOCK
from paceline.parallel.digest import digests
from paceline.parallel.outer.header import Header, RefusedExchangeError, Sites, own_name
from paceline.parallel.outer.optimizer import OuterUpdate
from paceline.parallel.outer.rows import Packing, Rows
from paceline.parallel.ranks.collectives import start_all_gather, start_all_to_all
from paceline.parallel.ranks.pending import collective_error
from paceline.parallel.same_model import fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class FragmentState:
    """What a rank keeps of its vector of a fragment from one exchange to the next."""

    values: Tensor
    """The parameters that all sites have in common."""
    velocity: Tensor | None
    """The momentum of the outer optimizer; None without momentum."""
    left_out: Tensor
    """What this rank's messages have left out of its outer gradients; empty without codes."""
    left_back: Tensor
    """What they have left out of the averages of its piece; empty without codes."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeReport:
    """An exchange, as this rank saw it."""

    exchange: int
    """Number of exchanges before it."""
    fragment: int
    """The fragment that was exchanged."""
    step: int
    """Steps of the inner optimizer when it was sent."""
    sent_bytes: int
    """Bytes that this rank has sent to other sites."""
    in_flight_s: float
    """Seconds from its start to its end."""
    exposed_s: float
    """Seconds for which training waited for it."""
    own_drift: float
    """Norm of this rank's outer gradient: how far its part of the fragment has moved."""
    mean_drift: float
    """Norm of the average of the sites' outer gradients."""


class Pieces:
    """The pieces of a vector that the sites own, equal on all of them.

    Args:
        length: Number of elements of the vector.
        num_sites: Number of sites.
    """

    def __init__(self, length: int, num_sites: int) -> None:
        self.num_blocks = -(-length // (BLOCK * num_sites))
        """Blocks of a piece."""
        size = self.num_blocks * BLOCK
        self.slices = [
            slice(min(site * size, length), min((site + 1) * size, length))
            for site in range(num_sites)
        ]
        """The elements of each site's piece."""


class Exchange:
    """An exchange in flight.

    Args:
        header: What this site says of it.
        gradient: This rank's outer gradient in float32, which is overwritten.
        state: What this rank keeps of the fragment; it does not change.
        packing: How numbers are packed.
        update: The outer optimizer.
    """

    def __init__(
        self,
        header: Header,
        gradient: Tensor,
        state: FragmentState,
        *,
        packing: Packing,
        update: OuterUpdate,
    ) -> None:
        self._header = header
        self._gradient = gradient
        self._state = state
        self._packing = packing
        self._update = update
        self._device = gradient.device
        self._began = time.perf_counter()
        self.own_drift = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        """Norm of this rank's outer gradient; not finite if a number of it is not."""
        self.mean_drift = 0.0
        self.in_flight_s = 0.0
        self.sent_bytes = 0
        self.error: PacelineError | None = None
        """Why the exchange failed."""
        self.result: FragmentState | None = None
        """What the rank keeps from now on; None if the exchange failed."""

    def run(self, group: dist.ProcessGroup) -> None:
        """Sends, waits and computes; leaves a result or an error, and raises nothing."""
        try:
            self.result = self._run(group)
        except PacelineError as error:
            self.error = error
        except RuntimeError as error:
            name = f"{own_name(self._header)} between sites"
            self.error = collective_error(name, self._gradient.nbytes, error)
            self.error.__cause__ = error
        self.in_flight_s = time.perf_counter() - self._began

    def _run(self, group: dist.ProcessGroup) -> FragmentState:
        sites = Sites(group, self._device)
        header = dataclasses.replace(
            self._header, is_finite=bool(torch.isfinite(self.own_drift)), num_members=len(sites)
        )
        damaged = sites.compare(header)
        left_out, left_back = self._state.left_out.clone(), self._state.left_back.clone()
        damaged += self._average(group, left_out, left_back)
        mean_drift = torch.linalg.vector_norm(self._gradient, dtype=torch.float64)
        values, velocity = self._update(self._state.values, self._state.velocity, self._gradient)
        found = FragmentState(
            values=values, velocity=velocity, left_out=left_out, left_back=left_back
        )
        common = [values] if velocity is None else [values, velocity]
        own = fingerprint([str(hash_) for hash_ in digests(common, self._device).tolist()])
        sites.settle(header, damaged[0] + 1 if damaged else 0, own)
        self.mean_drift = float(mean_drift)
        if not torch.isfinite(mean_drift):  # The same on all ranks, whose bits are equal.
            raise RefusedExchangeError(
                f"{own_name(header)}: outer gradients are too large for their sum or its codes; "
                "nothing was applied; lower the inner learning rate"
            )
        return found

    def _average(self, group: dist.ProcessGroup, left_out: Tensor, left_back: Tensor) -> list[int]:
        """Replaces the gradient by its average; returns sites whose messages arrived damaged."""
        num_sites, site = dist.get_world_size(group), dist.get_rank(group)
        pieces = Pieces(self._gradient.numel(), num_sites)
        rows = Rows(self._packing, pieces.num_blocks, self._device)
        out = rows.empty(num_sites)
        for owner, (row, piece) in enumerate(zip(out, pieces.slices, strict=True)):
            seal = self._seal("out", site, owner)
            rows.write(row, self._gradient[piece], left_out[piece], seal)
        received, arriving = start_all_to_all(out, group)
        arriving.wait()
        damaged = rows.damaged(
            received, [self._seal("out", source, site) for source in range(num_sites)]
        )
        own = self._gradient[pieces.slices[site]]
        for source, row in enumerate(received):
            rows.read(row, own, adds=source > 0)
        own.mul_(1 / num_sites)
        del out, received
        back = rows.empty(num_sites)
        rows.write(back[site], own, left_back, self._seal("back", site))
        borders = range(0, back.numel() + 1, rows.row_bytes)
        start_all_gather(back.view(-1), borders, group).wait()
        self.sent_bytes = 2 * (num_sites - 1) * rows.row_bytes
        damaged += rows.damaged(back, [self._seal("back", owner) for owner in range(num_sites)])
        for row, piece in zip(back, pieces.slices, strict=True):
            rows.read(row, self._gradient[piece], adds=False)
        return damaged

    def _seal(self, *place: object) -> int:
        return fingerprint([str(self._header.exchange), *map(str, place)])
