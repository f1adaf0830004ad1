"""Which records come from one machine, and which from one run of a command."""

import datetime

from paceline.records import Record

_STAMPING = datetime.timedelta(seconds=2)
"""A command stamps the records of a run one after the other within this time."""


def machine_of(record: Record) -> tuple[object, ...]:
    """Returns what tells the machine of a record from others."""
    there = record.environment
    return (there.processor, there.num_processors, there.memory_bytes, there.devices)


def moment_of(record: Record) -> datetime.datetime:
    """Returns when a record was made."""
    moment = datetime.datetime.fromisoformat(record.environment.time)
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def same_machine(first: Record, second: Record) -> bool:
    """Whether two records come from machines that nothing tells apart."""
    return machine_of(first) == machine_of(second)


def same_run(first: Record, second: Record) -> bool:
    """Whether two records were made by one run of a command."""
    return same_machine(first, second) and abs(moment_of(first) - moment_of(second)) <= _STAMPING
