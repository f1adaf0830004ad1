"""The network of a record, which the network lab passes in environment variables.

Every case may have these fields: the shaped rate, loss and delay of the hosts' links and of the
sites' uplinks, and the rates that a stream reached on both just before. Without a lab, the fields
are absent.
"""

import contextlib
import os
from collections.abc import Mapping
from typing import NamedTuple

from paceline.core.errors import HardwareError, UsageError
from paceline.core.hardware import find_device
from paceline.core.units import format_decimal
from paceline.records.kinds import (
    LINK_FIELDS,
    LINK_RATE,
    MEASURED_LINK_RATE,
    MEASURED_SITE_RATE,
    NUM_SITES,
    SITE_RATE,
)
from paceline.records.schema import CaseValue

_VARIABLES = {field: f"PACELINE_{field.upper()}" for field in LINK_FIELDS}


def link_variables(fields: Mapping[str, float | None]) -> dict[str, str]:
    """Returns the environment variables with which the lab passes these case fields to ranks."""
    return {_VARIABLES[field]: repr(value) for field, value in fields.items() if value is not None}


def link_case_fields() -> dict[str, float]:
    """Returns the case fields that describe the links; empty if nothing is known."""
    fields = {}
    for field, variable in _VARIABLES.items():
        value = os.environ.get(variable)
        try:
            if value is not None:
                fields[field] = int(value) if field == NUM_SITES else float(value)
        except ValueError:
            raise UsageError(f"{variable} is {value!r}; unset it") from None
    return fields


class Link(NamedTuple):
    """A link between ranks whose rate is known."""

    bytes_per_s: float
    """Bandwidth in one direction."""
    name: str
    """Description of the link, which states where its rate comes from."""


def is_loopback(case: Mapping[str, CaseValue]) -> bool:
    """Returns whether all ranks run on the CPUs of one host, so that no link is involved."""
    return case.get("device") == "cpu" and case.get("num_hosts") == 1


def line_rate(case: Mapping[str, CaseValue]) -> float | None:
    """Returns the rate of the slowest links that are shaped, in bits per second; None without any.

    A ring of ranks, which are numbered site by site, crosses each uplink once in each direction.
    """
    rates = [case.get(field) for field in (LINK_RATE, SITE_RATE)]
    return min((rate for rate in rates if isinstance(rate, int | float)), default=None)


def find_link(case: Mapping[str, CaseValue]) -> Link | None:
    """Returns the link if its rate is known: a shaped one, or the fastest of one host's GPUs.

    Loopback has no line rate: its bandwidth is limited by the CPU.
    """
    rate = line_rate(case)
    if is_loopback(case):
        return None
    if rate is not None:
        links = "uplinks of sites" if rate == case.get(SITE_RATE) else "links"
        return Link(bytes_per_s=rate / 8, name=f"{links} shaped to {format_decimal(rate, 'bit/s')}")
    if case.get("device", "cpu") != "cpu" and case.get("num_hosts") == 1:
        with contextlib.suppress(HardwareError):
            device = find_device(str(case["hardware"]))
            name = f"{device.links[0].name}, the fastest link of {device.name}"
            return Link(bytes_per_s=device.links[0].bytes_per_s.value, name=name)
    return None


def describe_link(case: Mapping[str, CaseValue]) -> str:
    """Returns the name of the link; of an unknown one, the rate that a stream reached on it."""
    if is_loopback(case):
        return "loopback"
    link = find_link(case)
    measured = case.get(MEASURED_SITE_RATE, case.get(MEASURED_LINK_RATE))
    if link is not None:
        return link.name
    if isinstance(measured, int | float):
        return f"a single stream reached {format_decimal(measured, 'bit/s')} just before"
    return "of unknown rate"
