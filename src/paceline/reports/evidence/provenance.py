"""The origin of records: the machine, the run of a command, the environment."""

import collections
import datetime
from collections.abc import Sequence

from paceline.core.units import format_decimal, format_gibibytes, to_gibibytes
from paceline.records import Environment, Record
from paceline.records.kinds import LINK_RATE

_STAMPING = datetime.timedelta(seconds=2)
"""Timestamps of records from one run of a command differ by at most this."""


def machine_of(record: Record) -> tuple[object, ...]:
    """Returns a key that identifies the machine of a record."""
    there = record.environment
    return (there.processor, there.num_processors, there.memory_bytes, there.devices)


def moment_of(record: Record) -> datetime.datetime:
    """Returns the time at which a record was created."""
    moment = datetime.datetime.fromisoformat(record.environment.time)
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def same_run(first: Record, second: Record) -> bool:
    """Returns whether two records come from the same run of a command."""
    apart = abs(moment_of(first) - moment_of(second))
    return machine_of(first) == machine_of(second) and apart <= _STAMPING


def describe_topology(record: Record) -> str:
    """Returns the hardware and hosts of a case, and the rate of its links if shaped."""
    case = record.case
    parts = [str(case.get("hardware", record.environment.processor))]
    if "num_hosts" in case:
        hosts = case["num_hosts"]
        parts.append("one host" if hosts == 1 else f"{hosts} hosts")
    rate = case.get(LINK_RATE)
    if isinstance(rate, int | float):
        parts.append(f"links of {format_decimal(rate, 'bit/s')}")
    return ", ".join(parts)


def describe_machines(records: Sequence[Record]) -> tuple[str, ...]:
    """Returns one line per machine with its number of records, regardless of software."""
    counts = collections.Counter(_hardware(record.environment) for record in records)
    return tuple(f"{machine}: {count} records" for machine, count in counts.items())


def describe_environments(records: Sequence[Record]) -> tuple[str, ...]:
    """Returns one line per environment of the records, with the dates of measurement."""
    times: dict[str, list[str]] = {}
    for record in records:
        times.setdefault(describe_environment(record.environment), []).append(
            record.environment.time
        )
    lines = []
    for machine, found in times.items():
        days = sorted({time[:10] for time in found})
        period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        lines.append(f"{machine}; {period}")
    return tuple(lines)


def describe_environment(environment: Environment) -> str:
    """Returns the hardware and software of an environment on one line."""
    packages = (f"{name} {version}" for name, version in environment.packages.items())
    software = ", ".join((f"Python {environment.python}", *packages))
    version = f"paceline {environment.paceline}"
    if environment.commit is not None:
        changed = ", modified" if environment.modified else ""
        version += f" at {environment.commit[:10]}{changed}"
    return "; ".join((_hardware(environment), software, environment.platform, version))


def _hardware(environment: Environment) -> str:
    memory = ""
    if environment.memory_bytes is not None:
        memory = f", {format_gibibytes(to_gibibytes(environment.memory_bytes), 1)}"
    processors = f"{environment.processor} ({environment.num_processors} processors{memory})"
    return "; ".join((processors, *environment.devices))
