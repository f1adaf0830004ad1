"""A rank that takes 1.5 times as long as the others is named within ten steps; no other is."""

import pathlib
import re
from collections.abc import Callable

import pytest

from paceline.parallel import RankPool
from tests.distributed.faulty_runs import Poison, events_of, train_faulty
from tests.distributed.small_runs import changed, small_run

Pools = Callable[[int], RankPool]
STEPS = 30
SLOWER = 15
"""The step from which one rank is slower."""
STEP_S = 0.06
"""Most of a step is sleep, so that other load on the machine matters less."""


@pytest.mark.alone  # Compares times, which other tests on the same cores disturb.
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_the_slow_rank_is_named_within_ten_steps(
    tmp_path: pathlib.Path, rank_pool: Pools, strategy: str
) -> None:
    config = changed(
        small_run(tmp_path), "run", training={"steps": STEPS}, parallel={"strategy": strategy}
    )
    every = tuple(range(1, STEPS + 1))
    even = [Poison(rank=r, passes=every, kind="slow", seconds=STEP_S) for r in (0, 1)]
    late = Poison(rank=1, passes=every[SLOWER - 1 :], kind="slow", seconds=STEP_S / 2)
    rank_pool(2).run(train_faulty, config, (), (*even, late))
    events = events_of(config, "straggler")
    assert re.match(
        r"rank 1 takes .* per step without waiting, 1\.\d+ times the median", events[0].message
    )
    assert SLOWER <= events[0].step <= SLOWER + 10
    assert all(event.message.startswith("rank 1") for event in events)
