"""What sites tell each other before and after an exchange, and why they refuse one.

All sites gather what each has to say, so all find the same differences and refuse together: no site
waits for a message that another does not send. A damaged header is seen by its receiver alone. It
goes on, because the sizes of messages follow from its own settings, and says so in its verdict.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.parallel.ranks.collectives import all_gather_single
from paceline.parallel.same_model import fingerprint

PROTOCOL = 1
"""Version of the messages between sites; it changes with their format."""


class RefusedExchangeError(PacelineError):
    """An exchange between sites that no site has applied; the message names the site at fault."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What a site says of an exchange before its numbers are sent."""

    protocol: int = PROTOCOL
    settings: int
    """Fingerprint of all settings, and of names and shapes of all parameters."""
    has_changed: bool
    """Whether other parameters are trained than when the outer loop was made."""
    num_members: int
    exchange: int
    """Number of exchanges before this one."""
    fragment: int
    step: int
    """Number of steps of the inner optimizer."""
    compression: int
    """Place of the compression among all."""
    num_elements: int
    """Number of elements of the message, with padding."""
    is_finite: bool

    def numbers(self) -> list[int]:
        """Returns the header as it is sent: its fields, then their checksum."""
        fields = [int(value) for value in dataclasses.astuple(self)]
        return [*fields, _checksum(fields)]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Header | None":
        """Returns the header that was sent, or None if it arrived damaged."""
        *values, checksum = numbers
        if _checksum(values) != checksum:
            return None
        named: dict[str, Any] = {
            field.name: value for field, value in zip(dataclasses.fields(cls), values, strict=True)
        }
        return cls(**named)


_RESUME = "resume all sites from checkpoints of one step"
_SAME = "give all sites the same settings and the same model"
_REMEDIES = {
    "protocol": "install the same version of paceline in all sites",
    "settings": _SAME,
    "num_members": _SAME,
    "exchange": _RESUME,
    "fragment": _RESUME,
    "step": _RESUME,
    "compression": _SAME,
    "num_elements": _SAME,
}


class Sites:
    """The members of a group, one per site, and what is said of them.

    Args:
        group: The group; all members call each method together, except for `name`.
        device: The device from which it sends.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._ranks = dist.get_process_group_ranks(group)

    def __len__(self) -> int:
        return len(self._ranks)

    def name(self, site: int) -> str:
        """Returns how errors call a member."""
        return f"site {site} (rank {self._ranks[site]})"

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of each member; waits for them."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        gathered = own.new_empty(len(self) * len(numbers))
        all_gather_single(gathered, own, group=self._group)
        rows: list[list[int]] = gathered.view(len(self), -1).tolist()
        return rows

    def compare(self, own: Header) -> list[int]:
        """Raises unless all headers fit together; returns members with damaged headers."""
        headers = [Header.of(numbers) for numbers in self.gather(own.numbers())]
        intact = {site: header for site, header in enumerate(headers) if header is not None}
        for field, remedy in _REMEDIES.items():
            said = {site: getattr(header, field) for site, header in intact.items()}
            self._require_equal(said, field, remedy)
        if changed := [self.name(site) for site, one in intact.items() if one.has_changed]:
            raise RefusedExchangeError(
                f"{own_name(own)}: other parameters are trained than when the outer loop was made, "
                f"in {' and '.join(changed)}; nothing was applied; finish() the loop and make a "
                "new one after parameters are frozen or unfrozen"
            )
        if bad := [self.name(site) for site, one in intact.items() if not one.is_finite]:
            raise RefusedExchangeError(
                f"{own_name(own)}: parameters are not finite in {' and '.join(bad)}; nothing was "
                "applied; resume all sites from a checkpoint before it, with a lower learning rate "
                "if it occurs again"
            )
        return [site for site, header in enumerate(headers) if header is None]

    def _require_equal(self, said: dict[int, Any], field: str, remedy: str) -> None:
        if len(set(said.values())) < 2:
            return
        expected, _ = Counter(said.values()).most_common(1)[0]
        reference = next(site for site, value in said.items() if value == expected)
        other = next(site for site, value in said.items() if value != expected)
        raise RefusedExchangeError(
            f"{self.name(other)} has {field.replace('num_', 'number of ')} {said[other]} where "
            f"{self.name(reference)} has {expected}; nothing was applied; {remedy}"
        )

    def settle(self, own: Header, damage: int, digest: int) -> None:
        """Raises if a message was damaged on its way, or if members end with other bits.

        Args:
            own: This member's header.
            damage: The member from which a damaged message came, 1 for the first; 0 for none.
            digest: Hash of what this member would apply.
        """
        said = self.gather([damage, digest])
        for receiver, (sender, _) in enumerate(said):
            if sender:
                raise RefusedExchangeError(
                    f"{own_name(own)}: a message from {self.name(sender - 1)} arrived damaged at "
                    f"{self.name(receiver)}; nothing was applied; resume all sites from their last "
                    "checkpoints, and check network and memory of both if it occurs again"
                )
        digests = [found for _, found in said]
        if len(set(digests)) < 2:
            return
        common, number = Counter(digests).most_common(1)[0]
        others = [self.name(site) for site, found in enumerate(digests) if found != common]
        who = f"{' and '.join(others)} from {number} of {len(self)} sites"
        if 2 * number <= len(self):
            who = f"{self.name(digests.index(common))} and {others[0]}"
        raise RefusedExchangeError(
            f"{own_name(own)}: the common parameters of {who} would differ; nothing was applied; "
            f"{_RESUME}"
        )


def own_name(header: Header) -> str:
    """Returns how errors call the exchange of a header."""
    return f"exchange {header.exchange} (fragment {header.fragment}, step {header.step})"


def _checksum(values: Sequence[int]) -> int:
    return fingerprint([str(value) for value in values])
