"""Measures several ways to do the same thing in turns, so that other load affects all of them."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

_Result = TypeVar("_Result")


def interleaved(
    ways: Mapping[str, Callable[[], _Result]], rounds: int, *, warmup: int = 1
) -> dict[str, list[_Result]]:
    """Runs every way once per round; returns the results of each way, one per round.

    The order rotates from round to round, so that no way always runs first. It is the same on all
    ranks. The results of the first `warmup` rounds are dropped.
    """
    names = list(ways)
    found: dict[str, list[_Result]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            result = ways[name]()
            if number >= 0:
                found[name].append(result)
    return found


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Returns a function that calls `run` and returns the seconds that it took."""

    def run_and_time() -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return run_and_time
