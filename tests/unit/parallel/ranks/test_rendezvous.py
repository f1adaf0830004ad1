"""Tests that restarted ranks meet despite leftovers of a dead attempt in the agent's store."""

import dataclasses
import datetime
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from paceline.parallel.ranks import rendezvous
from paceline.parallel.ranks.placement import Placement, local_placement

TIMEOUT = datetime.timedelta(seconds=20)


@pytest.fixture
def agent() -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _placement(agent: Store, rank: int, world_size: int = 2) -> Placement:
    return dataclasses.replace(
        local_placement("torchrun", rank, world_size),
        master_address="127.0.0.1",
        master_port=agent.port,
    )


def _meet(
    agent: Store, world_size: int = 2, delays_s: tuple[float, ...] = (0.3, 0.0, 0.0)
) -> list[Store]:
    """Joins all ranks; rank 0 comes last by default, so the others first find old entries."""

    def join(rank: int) -> Store:
        time.sleep(delays_s[rank])
        return rendezvous.attempt_store(_placement(agent, rank, world_size), TIMEOUT)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(join, range(world_size)))


def _say_hello(stores: list[Store]) -> None:
    stores[0].set("hello", "first")
    assert [store.get("hello") for store in stores] == [b"first"] * len(stores)


def test_ranks_meet_in_a_store_of_their_own(agent: Store) -> None:
    stores = _meet(agent, 3)
    _say_hello(stores)
    assert not agent.check(["hello"])


def test_the_address_of_a_dead_attempt_is_passed_over(agent: Store) -> None:
    _meet(agent)  # Dropping the list closes its store.
    _say_hello(_meet(agent))


def test_the_store_of_an_attempt_that_has_not_ended_yet_is_passed_over(agent: Store) -> None:
    older = _meet(agent)
    newer = _meet(agent)
    _say_hello(newer)
    assert not older[0].check(["hello"])


def test_a_rank_that_met_an_overtaken_attempt_leaves_it(agent: Store) -> None:
    """Rank 0 of the older attempt is still waiting when a rank of the newer attempt finds it."""

    def overtaken() -> None:
        with pytest.raises(
            rendezvous.RendezvousError, match=r"1 of 3 ranks did not connect to .*: 2"
        ):
            rendezvous.attempt_store(_placement(agent, 0, 3), datetime.timedelta(seconds=2))

    with ThreadPoolExecutor(1) as threads:
        older = threads.submit(overtaken)
        while not agent.check(["paceline/attempt"]):
            time.sleep(0.01)
        _say_hello(_meet(agent, 3, delays_s=(0.3, 0.0, 0.6)))
        older.result()


def test_a_port_that_another_program_has_by_now_is_passed_over(agent: Store) -> None:
    stranger = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stale = {"address": "127.0.0.1", "port": stranger.port, "nonce": "stale", "world_size": 2}
    agent.set("paceline/attempt", json.dumps(stale))
    stranger.set("paceline/nonce", "another")
    _say_hello(_meet(agent))


def test_who_is_missing_is_said(agent: Store) -> None:
    short = datetime.timedelta(seconds=2)
    with pytest.raises(
        rendezvous.RendezvousError, match=r"2 of 3 ranks did not connect to 127\.0\.0\.1.*: 1, 2"
    ):
        rendezvous.attempt_store(_placement(agent, 0, 3), short)
    with pytest.raises(rendezvous.RendezvousError, match="no store of rank 0 answers after"):
        rendezvous.attempt_store(_placement(agent, 1, 2), short)


def test_the_own_address_towards_loopback_is_loopback() -> None:
    assert rendezvous._own_address("localhost", 29500) in ("127.0.0.1", "::1")
