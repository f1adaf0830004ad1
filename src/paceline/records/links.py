"""The network that a record was made on, as the lab tells through the environment.

Every case may carry these fields: the rate that the links were shaped to, their loss and delay, and
the rate that a stream reached on them just before. Without a lab there is nothing to tell.
"""

import contextlib
import os
from collections.abc import Mapping

from paceline.core.device_table import find_device
from paceline.core.errors import HardwareError, UsageError
from paceline.records.kinds import (
    LINK_DELAY,
    LINK_FIELDS,
    LINK_LOSS,
    LINK_RATE,
    MEASURED_LINK_RATE,
)
from paceline.records.schema import CaseValue

_VARIABLES = {field: f"PACELINE_{field.upper()}" for field in LINK_FIELDS}


def link_variables(
    *,
    rate_bits_per_s: float | None,
    measured_rate_bits_per_s: float,
    loss: float,
    delay_s: float,
) -> dict[str, str]:
    """Returns the environment by which the lab describes its links."""
    values = {
        LINK_RATE: rate_bits_per_s,
        LINK_LOSS: loss or None,
        LINK_DELAY: delay_s or None,
        MEASURED_LINK_RATE: round(measured_rate_bits_per_s),
    }
    return {_VARIABLES[field]: repr(value) for field, value in values.items() if value is not None}


def link_case_fields(environment: Mapping[str, str] | None = None) -> dict[str, float]:
    """Returns the case fields that describe the links, empty where nothing is known."""
    variables = os.environ if environment is None else environment
    fields = {}
    for field, variable in _VARIABLES.items():
        if variable not in variables:
            continue
        try:
            fields[field] = float(variables[variable])
        except ValueError:
            raise UsageError(f"{variable} is {variables[variable]!r}; unset it") from None
    return fields


def line_bytes_per_s(case: Mapping[str, CaseValue]) -> float | None:
    """Returns what a link of this case can carry in one direction, where that is known.

    A shaped link has the rate that it was shaped to; GPUs of one host have their fastest link.
    Loopback has no line rate: there it is the processor that is measured.
    """
    rate = case.get(LINK_RATE)
    if isinstance(rate, int | float):
        return rate / 8
    if case.get("device") == "cuda" and case.get("num_hosts") == 1:
        with contextlib.suppress(HardwareError):
            return find_device(str(case["hardware"])).links[0].bytes_per_s.value
    return None
