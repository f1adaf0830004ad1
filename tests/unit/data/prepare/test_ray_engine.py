"""Tests of the Ray engine, on a real cluster of three nodes on this machine."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.core.errors import DataError, UsageError
from paceline.data.prepare import engines as ray_engine
from paceline.data.prepare import tokenize
from paceline.data.prepare.engines import RayEngine
from paceline.data.prepare.run import prepare
from paceline.data.tokenizer import train_bpe
from tests.unit.data.corpus import config_of, dataset_bytes, make_documents, write_corpus
from tests.unit.data.engine_tasks import Task, die_at_first, refuse, square

NUM_NODES = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    search_path = os.pathsep.join(each for each in sys.path if each)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", search_path)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster()
        for _ in range(NUM_NODES):
            cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=10**8)
        cluster.wait_for_nodes()
        yield cluster
        cluster.shutdown()


@pytest.fixture
def engine(cluster: Any) -> Iterator[RayEngine]:
    with contextlib.closing(RayEngine(cluster.address, None)) as engine:
        yield engine


@pytest.mark.slow
def test_tasks_run_on_the_nodes_and_outlive_their_workers(
    engine: RayEngine, tmp_path: pathlib.Path
) -> None:
    results = dict(engine.run(square, [Task(number) for number in range(20)]))
    assert [results[number][0] for number in range(20)] == [number**2 for number in range(20)]
    assert os.getpid() not in {pid for _, pid in results.values()}
    tasks = [Task(number, str(tmp_path), number % 3) for number in range(6)]
    assert sorted(engine.run(die_at_first, tasks)) == [(number, number) for number in range(6)]
    with pytest.raises(DataError, match="task 5: refused"):
        list(engine.run(refuse, [Task(5)]))
    with pytest.raises(DataError, match="task 7: Ray lost this task"):
        list(engine.run(die_at_first, [Task(7, str(tmp_path), 9)]))


@pytest.mark.slow
def test_the_result_is_that_of_the_local_engine(
    cluster: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "SMALLEST_PIECE_BYTES", 4000)
    write_corpus(tmp_path / "corpus")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(train_bpe(make_documents(100), 300))
    local = config_of(tmp_path / "corpus", tmp_path / "local", tokenizer=str(tokenizer))
    prepare(local)
    spread = config_of(
        *(tmp_path / "corpus", tmp_path / "ray"),
        tokenizer=str(tokenizer),
        engine="ray",
        workers=None,
        ray_address=cluster.address,
    )
    prepare(spread)
    assert dataset_bytes(tmp_path / "local") == dataset_bytes(tmp_path / "ray")


@pytest.mark.slow
def test_a_node_that_dies_changes_nothing(
    cluster: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "SMALLEST_PIECE_BYTES", 4000)
    write_corpus(tmp_path / "corpus", per_file=600)
    prepare(config_of(tmp_path / "corpus", tmp_path / "local"))
    doomed = cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=10**8)
    cluster.wait_for_nodes()
    num_calls = 0

    def remove_node(_done: int, _total: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            cluster.remove_node(doomed, allow_graceful=False)

    spread = config_of(
        *(tmp_path / "corpus", tmp_path / "ray"),
        engine="ray",
        workers=None,
        ray_address=cluster.address,
    )
    prepare(spread, remove_node)
    assert num_calls > 5
    assert dataset_bytes(tmp_path / "local") == dataset_bytes(tmp_path / "ray")


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_named() -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match=r"--ray-address 127\.0\.0\.1:1.*ray start"):
        RayEngine("127.0.0.1:1", None)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"paceline\[ray\]"):
        ray_engine.RayEngine(None, None)
