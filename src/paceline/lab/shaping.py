"""What a link is to be like, as people write it and as the kernel takes it."""

import dataclasses
import re

from paceline.core.errors import UsageError

_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

# A queue of packets that the line drains in this time; longer ones are dropped, as by a switch.
_QUEUE_S = 0.2
# The bucket lets this much through at once. A large one lets small messages outrun the line; one
# below the 64 KiB of a segmentation-offload packet would drop those.
_MINIMUM_BURST_BYTES = 64 * 1024
_BURST_S = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkShape:
    """The line between a host and the switch, the same in both directions."""

    rate_bits_per_s: float | None = None
    """None for as fast as the kernel can."""
    delay_s: float = 0.0
    """Added on the way from one host to another."""
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
        """The arguments of the kernel's token bucket for this rate."""
        rate = self.rate_bits_per_s or 0.0
        burst = max(_MINIMUM_BURST_BYTES, int(rate / 8 * _BURST_S))
        limit = burst + int(rate / 8 * _QUEUE_S)
        return ["tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "limit", f"{limit}b"]


def parse_rate(text: str) -> float:
    """Reads a rate such as ``2gbit`` or ``200mbit`` as bits per second."""
    return _parse(text, _RATE_UNITS, "rate", "2gbit")


def parse_delay(text: str) -> float:
    """Reads a delay such as ``5ms`` as seconds."""
    return _parse(text, _TIME_UNITS, "delay", "5ms")


def parse_loss(text: str) -> float:
    """Reads a loss such as ``1%`` as a share."""
    return _parse(text, {"%": 0.01}, "loss", "1%")


def _parse(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z%]+)", text.strip().lower())
    if match is None or match[2] not in units:
        raise UsageError(
            f"cannot read the {what} {text!r}; write it like {example} (units: {', '.join(units)})"
        )
    return float(match[1]) * units[match[2]]
