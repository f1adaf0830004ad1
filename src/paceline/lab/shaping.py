"""The properties of a link, parsed from user input and converted to `tc` arguments."""

import dataclasses

from paceline.core.errors import UsageError
from paceline.core.units import parse_quantity

# Queue length as the time to drain it; packets beyond it are dropped, as by a switch.
_QUEUE_S = 0.2
# Bytes that the token bucket passes at once. A large burst lets small messages exceed the rate; one
# below the 64 KiB of a segmentation-offload packet would drop such packets.
_MINIMUM_BURST_BYTES = 64 * 1024
_BURST_S = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkShape:
    """The link between a host and the switch, symmetric in both directions."""

    rate_bits_per_s: float | None = None
    """Rate in bits per second; None for unlimited."""
    delay_s: float = 0.0
    """Delay added to each packet between two hosts."""
    loss: float = 0.0
    """Share of packets dropped on arrival."""

    def __post_init__(self) -> None:
        if self.rate_bits_per_s is not None and not self.rate_bits_per_s >= 1e6:
            raise UsageError("a link's rate must be at least 1mbit")
        if not 0 <= self.delay_s <= 10:
            raise UsageError("a link's delay must be between 0 and 10s")
        if not 0 <= self.loss < 1:
            raise UsageError("a link's loss must be at least 0% and below 100%")

    @property
    def bucket_arguments(self) -> list[str]:
        """The `tc` arguments of a token bucket filter for this rate."""
        rate = self.rate_bits_per_s or 0.0
        burst = max(_MINIMUM_BURST_BYTES, int(rate / 8 * _BURST_S))
        limit = burst + int(rate / 8 * _QUEUE_S)
        return ["tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "limit", f"{limit}b"]


def parse_loss(text: str) -> float:
    """Parses a loss such as ``1%`` into a fraction."""
    return parse_quantity(text, {"%": 0.01}, "loss", "1%")
