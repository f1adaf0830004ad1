"""What carries the messages of a case: a line of a known rate, or what is known instead."""

import dataclasses
from collections.abc import Mapping

from paceline.core.device_table import find_device
from paceline.core.units import format_decimal
from paceline.records import CaseValue
from paceline.records.kinds import LINK_RATE, MEASURED_LINK_RATE
from paceline.records.links import line_bytes_per_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A link between ranks."""

    bytes_per_s: float
    """What it carries in one direction."""
    name: str
    """Which link, and so what its rate rests on."""


def is_loopback(case: Mapping[str, CaseValue]) -> bool:
    """Returns whether ranks on processors of one host reach each other without any line."""
    return case.get("device") == "cpu" and case.get("num_hosts") == 1


def find_line(case: Mapping[str, CaseValue]) -> Line | None:
    """Returns the line whose rate is known: a shaped one, or the fastest of a host's GPUs."""
    rate = None if is_loopback(case) else line_bytes_per_s(case)
    if rate is None:
        return None
    shaped = case.get(LINK_RATE)
    if isinstance(shaped, int | float):
        return Line(bytes_per_s=rate, name=f"links shaped to {format_decimal(shaped, 'bit/s')}")
    device = find_device(str(case["hardware"]))
    name = f"{device.links[0].name}, the fastest link of {device.name}"
    return Line(bytes_per_s=rate, name=name)


def describe_unknown_line(case: Mapping[str, CaseValue]) -> str:
    """Says that there is a line of unknown rate, and what a stream reached on it, if one did."""
    text = "The line's rate is not known here"
    measured = case.get(MEASURED_LINK_RATE)
    if isinstance(measured, int | float):
        text += f" (a single stream reached {format_decimal(measured, 'bit/s')} just before)"
    return text
