"""Ranks that are threads of the test's process, for checks in which ranks exchange what they found.

A rank that leaves out a message which others wait for is an error at once, not a hang.
"""

from collections.abc import Callable
from typing import Any

from tests.unit.parallel.simulation.group import simulated_ranks


def on_ranks(num_ranks: int, program: Callable[[int], Any]) -> tuple[list[Any], list[str]]:
    """Returns what a program returns on each rank, and the messages that a rank took part in.

    The program gets its rank. All ranks take part in the same messages.
    """
    with simulated_ranks(num_ranks) as (scheduler, device):
        results = scheduler.run(program, seed=0)
        first, *others = device.launches
        assert all(launches == first for launches in others)
        return results, list(first)


def agreed(num_ranks: int, program: Callable[[int], Any]) -> Any:
    """Returns what a program returns on every rank, which must be the same."""
    (result, *others), _ = on_ranks(num_ranks, program)
    assert all(other == result for other in others)
    return result
