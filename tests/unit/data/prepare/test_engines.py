"""Tests that the local engine completes every task once, even if workers die."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import pytest

from paceline.core.errors import DataError
from paceline.data.prepare.engines import LocalEngine
from tests.unit.data.engine_tasks import Task, die_at_first, divide, refuse, square


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with contextlib.closing(LocalEngine(2)) as engine:
        yield engine


def test_every_task_is_done_in_other_processes(engine: LocalEngine) -> None:
    results = dict(engine.run(square, [Task(number) for number in range(20)]))
    assert {number: result[0] for number, result in results.items()} == {
        number: number**2 for number in range(20)
    }
    assert os.getpid() not in {pid for _, pid in results.values()}
    assert not list(engine.run(square, []))


def test_a_single_worker_is_this_process() -> None:
    assert list(LocalEngine(1).run(square, [Task(3)])) == [(0, (9, os.getpid()))]


def test_a_worker_that_dies_is_replaced(engine: LocalEngine, tmp_path: pathlib.Path) -> None:
    tasks = [Task(number, str(tmp_path), number % 4) for number in range(8)]
    assert sorted(engine.run(die_at_first, tasks)) == [(number, number) for number in range(8)]


def test_a_task_that_kills_every_worker_is_named(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(LocalEngine(2)) as engine:
        tasks = [Task(0), Task(1, str(tmp_path), 9)]
        with pytest.raises(DataError, match=r"task 1: the worker died 4 times.*SIGKILL"):
            list(engine.run(die_at_first, tasks))


def test_errors_arrive_as_they_were() -> None:
    with contextlib.closing(LocalEngine(2)) as engine:
        with pytest.raises(DataError, match="task 5: refused"):
            list(engine.run(refuse, [Task(5)]))
        with pytest.raises(ZeroDivisionError) as caught:
            list(engine.run(divide, [Task(0)]))
    assert "in divide" in caught.value.__notes__[0]
