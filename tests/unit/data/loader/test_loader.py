"""Tests that batches do not depend on ranks, prefetching or resuming, and that a seek is O(1)."""

import gc
import itertools
import pathlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import DataError, UsageError
from paceline.data.audit import AuditTrail, check_audit, read_audit
from paceline.data.loader import loader as loader_module
from paceline.data.loader.batches import Batch, BatchReader
from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import Prefetcher, TokenLoader
from paceline.data.sampling import SampleStream
from studies.data import seek
from studies.harness.study import in_fresh_process
from tests.unit.data.dataset_factory import random_documents, write_dataset

LENGTH = 10


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    places = []
    for number, num_tokens in enumerate((1501, 400, 47)):
        place = tmp_path_factory.mktemp("dataset")
        write_dataset(place, random_documents(num_tokens, seed=number))
        places.append(str(place))
    return places


def make_config(places: list[str], **options: Any) -> LoaderConfig:
    sources = tuple(
        SourceConfig(place=place, weight=1 + number) for number, place in enumerate(places)
    )
    return LoaderConfig(sources=sources, **{"context_length": LENGTH, "batch_size": 12, **options})


def take_step(loaders: list[TokenLoader]) -> list[Batch]:
    return [next(loader) for loader in loaders]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_resumed_pieces_are_one_uninterrupted_run(places: list[str], data: st.DataObject) -> None:
    chosen = places[: data.draw(st.integers(1, 3))]
    options = {
        "seed": data.draw(st.integers(0, 2**64)),
        "window": data.draw(st.none() | st.integers(1, 60)),
        "prefetch": data.draw(st.integers(0, 2)),
    }
    pieces = data.draw(
        st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=5)
    )
    num_steps = sum(steps for _, steps in pieces)
    rows, digests, state = [], [], None
    for world_size, steps in pieces:
        loaders = [
            TokenLoader(make_config(chosen, **options), rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for _ in range(steps):
            batches = take_step(loaders)
            rows.extend(batch.rows for batch in batches)
            digests.append(sum(batch.digest or 0 for batch in batches) % 2**64)
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] for each in states)
        state = pickle.loads(pickle.dumps(states[0]))
        for loader in loaders:
            loader.close()
    with TokenLoader(make_config(chosen, **options)) as alone:
        expected = [next(alone) for _ in range(num_steps)]
    assert np.concatenate(rows).tolist() == np.concatenate([b.rows for b in expected]).tolist()
    assert digests == [batch.digest for batch in expected]
    assert [batch.step for batch in expected] == list(range(num_steps))


@pytest.mark.parametrize("at_once", [1, 5, 30])
@pytest.mark.parametrize("every", [1, 3])
def test_batches_are_those_at_their_positions(
    places: list[str], monkeypatch: pytest.MonkeyPatch, at_once: int, every: int
) -> None:
    monkeypatch.setattr(loader_module, "_SAMPLES_LOCATED_AT_ONCE", at_once)
    config = make_config(places)
    reader = BatchReader(config)
    with TokenLoader(config, rank=1, world_size=5, every=every) as loader:
        loader.skip(2)
        for number in range(30):
            step = 2 + number * every
            batch = next(loader)
            expected = reader.read(np.arange(step * 12 + 2, step * 12 + 4), step=step)
            assert (batch.step, batch.first_sample) == (step, expected.first_sample)
            assert batch.digest == expected.digest
            assert loader.state_dict()["consumed_samples"] == (step + every) * 12


def test_an_audit_finds_what_was_changed_or_skipped(tmp_path: pathlib.Path) -> None:
    write_dataset(tmp_path / "dataset", random_documents(1500))
    config = make_config([str(tmp_path / "dataset")])
    for rank in range(3):
        trail = AuditTrail(tmp_path / f"{rank}.jsonl")
        with TokenLoader(config, rank=rank, world_size=3) as loader:
            for batch in itertools.islice(loader, 9):
                trail.append(batch.audit_row)
    rows = list(read_audit(tmp_path.glob("*.jsonl")))
    reader = BatchReader(config)
    assert check_audit(rows, reader.digest) == []
    reader.close()
    left_out = rows.pop(10)
    (finding,) = check_audit(rows, BatchReader(config).digest)
    assert (finding.problem, finding.first_sample) == ("gap", left_out.first_sample)
    for shard in (tmp_path / "dataset").rglob("*.tokens"):
        content = bytearray(shard.read_bytes())
        content[0] ^= 1
        shard.write_bytes(content)
    problems = {finding.problem for finding in check_audit(rows, BatchReader(config).digest)}
    assert problems == {"gap", "digest"}


def test_a_batch_without_a_digest_cannot_be_audited(places: list[str]) -> None:
    with TokenLoader(make_config(places, digests=False)) as loader:
        batch = next(loader)
    with pytest.raises(UsageError, match="set digests"):
        _ = batch.audit_row


def test_an_epoch_holds_each_sample_once(places: list[str]) -> None:
    # 150 samples, 12 per step: the epoch ends within a step.
    with TokenLoader(make_config(places[:1])) as loader:
        rows = np.concatenate([next(loader).rows for _ in range(25)])
    for epoch in (rows[:150], rows[150:]):
        assert len({tuple(row) for row in epoch.tolist()}) == 150


def test_a_run_may_change_its_batch_size(places: list[str]) -> None:
    with TokenLoader(make_config(places)) as loader:
        whole = np.concatenate([next(loader).rows for _ in range(10)])
    with TokenLoader(make_config(places, batch_size=30)) as first:
        rows = [next(first).rows for _ in range(2)]
        state = first.state_dict()
    assert state["consumed_samples"] == 60
    with TokenLoader(make_config(places)) as second:
        second.load_state_dict(state)
        rows += [next(second).rows for _ in range(5)]
        assert second.state_dict()["step"] == 7
    assert np.concatenate(rows).tolist() == whole.tolist()


def test_the_state_knows_nothing_of_what_was_read_ahead(places: list[str]) -> None:
    with TokenLoader(make_config(places, prefetch=5)) as loader:
        assert loader.state_dict()["consumed_samples"] == 0
        next(loader)
        assert loader.state_dict()["consumed_samples"] == 12
        assert len(pickle.dumps(loader.state_dict())) < 500


def test_a_loader_goes_back_to_a_state(places: list[str]) -> None:
    with TokenLoader(make_config(places)) as loader:
        next(loader)
        state = loader.state_dict()
        second = next(loader).rows
        next(loader)
        loader.load_state_dict(state)
        assert next(loader).rows.tolist() == second.tolist()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "seed was 0 and is 1 now"),
        ({"window": 7}, "window was None and is 7"),
        ({"context_length": 9}, "context_length was 10"),
        ({"sources": 2}, "datasets was"),
        ({"weight": 3}, "mixture was"),
    ],
)
def test_another_stream_is_refused_by_name(
    places: list[str], change: dict[str, Any], name: str
) -> None:
    with TokenLoader(make_config(places)) as loader:
        state = loader.state_dict()
    if "sources" in change:
        config = make_config(places[:2])
    elif "weight" in change:
        sources = tuple(SourceConfig(place=place) for place in places)
        config = LoaderConfig(sources=sources, context_length=LENGTH, batch_size=12)
    else:
        config = make_config(places, **change)
    with TokenLoader(config) as other, pytest.raises(DataError, match=name):
        other.load_state_dict(state)


def test_a_dataset_may_move(places: list[str], tmp_path: pathlib.Path) -> None:
    with TokenLoader(make_config(places[:1])) as loader:
        next(loader)
        state = loader.state_dict()
        expected = next(loader).rows
    moved = tmp_path / "elsewhere"
    moved.symlink_to(places[0])
    with TokenLoader(make_config([str(moved)])) as loader:
        loader.load_state_dict(state)
        assert next(loader).rows.tolist() == expected.tolist()


def test_an_error_of_the_thread_reaches_the_consumer(tmp_path: pathlib.Path) -> None:
    write_dataset(tmp_path, random_documents(1000))
    (tmp_path / "train").rename(tmp_path / "elsewhere")
    with TokenLoader(make_config([str(tmp_path)])) as loader:
        with pytest.raises(DataError, match="incomplete") as caught:
            next(loader)
        functions = [entry.name for entry in caught.traceback]
        assert "_make_items" in functions
        assert "_tokens" in functions
        # After the problem is fixed, the loader continues where it was.
        (tmp_path / "elsewhere").rename(tmp_path / "train")
        assert [next(loader).step for _ in range(2)] == [0, 1]


def test_configs_that_make_no_sense_are_refused(places: list[str]) -> None:
    for options, message in (
        ({"batch_size": 0}, "batch_size 0"),
        ({"prefetch": -1}, "prefetch -1"),
        ({"context_length": 0}, "context_length 0"),
    ):
        with pytest.raises(UsageError, match=message):
            make_config(places, **options)
    with pytest.raises(UsageError, match="sources is empty"):
        make_config([])
    with pytest.raises(UsageError, match="12 samples per step cannot be shared by 13"):
        TokenLoader(make_config(places), rank=0, world_size=13)


def test_sources_of_different_tokenizers_are_refused(tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        write_dataset(tmp_path / name, random_documents(100), tokenizer=name.encode())
    with pytest.raises(DataError, match=r"/b was prepared with another tokenizer than .*/a"):
        TokenLoader(make_config([str(tmp_path / name) for name in ("a", "b")]))


def num_threads() -> int:
    return sum(thread.name == "prefetch-batches" for thread in threading.enumerate())


def test_items_come_in_order_and_end() -> None:
    assert list(Prefetcher(iter(range(100)), 2)) == list(range(100))
    assert num_threads() == 0


def test_it_makes_no_more_than_its_depth_ahead() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in itertools.count():
            made.append(number)
            yield number

    prefetcher = Prefetcher(items(), 3)
    for taken in range(1, 5):
        assert next(prefetcher) == taken - 1
        time.sleep(0.02)
        assert len(made) <= taken + 3
    prefetcher.close()


def test_close_ends_thread_and_iterator() -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    prefetcher = Prefetcher(items(), 2)
    next(prefetcher)
    prefetcher.close()
    prefetcher.close()
    assert num_threads() == 0
    assert closed == [True]
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_a_thread_does_not_outlive_its_owner() -> None:
    prefetcher = Prefetcher(itertools.count(), 2)
    next(prefetcher)
    del prefetcher
    gc.collect()
    assert num_threads() == 0


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no second")

    prefetcher = Prefetcher(items(), 5)
    assert next(prefetcher) == 1
    with pytest.raises(ValueError, match="no second") as caught:
        next(prefetcher)
    assert "items" in [entry.name for entry in caught.traceback]
    assert num_threads() == 0


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)", "next(p); gc.freeze()"])
def test_a_program_ends_while_the_thread_waits(end: str) -> None:
    program = (
        "import gc, itertools\n"
        "from paceline.data.loader.loader import Prefetcher\n"
        "p = Prefetcher(itertools.count(), 2)\n"
        f"next(p)\n{end}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""


@pytest.mark.parametrize("context", seek.CONTEXTS)
def test_a_sample_of_very_many_is_read_at_once(tmp_path: pathlib.Path, context: int) -> None:
    # The manifest lists 10^5 shards; only the files that are needed exist.
    num_samples = (seek.NUM_SHARDS * seek.SHARD_TOKENS - 1) // context
    first = seek.FIRST_SAMPLE
    stream = SampleStream([num_samples], weights=[1], seed=0)
    _, samples = stream.locate(np.arange(first, first + seek.BATCH))
    seek.write_sparse_dataset(
        tmp_path / "dataset", (samples * context // seek.SHARD_TOKENS).tolist()
    )
    rounds = [
        in_fresh_process(seek.seek, str(tmp_path / "dataset"), context, first) for _ in range(3)
    ]
    # 42 ms on an idle machine. Other load disturbs only one of the two clocks. Reading something
    # of every shard would take seconds.
    assert min(min(each["cpu_time_s"], each["total_time_s"]) for each in rounds) < 1
    assert max(each["resident_peak_bytes"] for each in rounds) < 100e6


class _Items:
    """An iterator that fails, and tells whether it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        raise ValueError("none")

    def close(self) -> None:
        self.closed += 1


def test_after_an_error_there_are_no_more_items() -> None:
    items = _Items()
    prefetcher = Prefetcher(items, 2)
    with pytest.raises(ValueError, match="none"):
        next(prefetcher)
    assert items.closed == 1
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_a_state_of_another_version_is_refused(places: list[str]) -> None:
    with TokenLoader(make_config(places)) as loader:
        state = loader.state_dict() | {"schema": 2}
        with pytest.raises(DataError, match=r"state has schema 2, but this version .* reads 1"):
            loader.load_state_dict(state)


def test_batches_that_were_read_ahead_are_skipped_too(places: list[str]) -> None:
    with TokenLoader(make_config(places)) as loader:
        rows = [next(loader).rows.tolist() for _ in range(6)]
    with TokenLoader(make_config(places, prefetch=4)) as loader:
        next(loader)
        loader.skip(3)
        batch = next(loader)
    assert (batch.step, batch.rows.tolist()) == (4, rows[4])


def test_a_loader_that_is_left_ends_its_thread_and_closes_its_files(places: list[str]) -> None:
    closed: list[bool] = []
    with TokenLoader(make_config(places, prefetch=2)) as loader:
        next(loader)
        loader.reader.close = lambda: closed.append(True)  # type: ignore[method-assign]
        assert num_threads() == 1
    assert num_threads() == 0
    assert closed == [True]


def test_what_will_be_read_is_fetched_ahead(places: list[str]) -> None:
    with TokenLoader(make_config(places)) as loader:
        asked: list[tuple[list[int], list[int]]] = []
        loader.reader.fetch_ahead = lambda sources, samples: asked.append(  # type: ignore[method-assign]
            (sources.tolist(), samples.tolist())
        )
        batch = next(loader)
        sources, samples = loader.reader.locate(np.arange(4096 // 12 * 12))
    assert asked[0] == (sources.tolist(), samples.tolist())
    assert batch.first_sample == 0


def test_samples_are_fetched_from_their_own_source(places: list[str]) -> None:
    reader = BatchReader(make_config(places))
    asked: list[tuple[int, list[int]]] = []

    class Source:
        def __init__(self, number: int) -> None:
            self.number = number

        def fetch_ahead(self, samples: np.ndarray) -> None:
            asked.append((self.number, samples.tolist()))

    reader._sources = [Source(number) for number in range(3)]  # type: ignore[misc]
    reader.fetch_ahead(np.array([0, 2, 0, 1]), np.array([5, 6, 7, 8]))
    assert asked == [(0, [5, 7]), (1, [8]), (2, [6])]


def test_rows_of_a_mixture_are_those_of_their_sources(tmp_path: pathlib.Path) -> None:
    for number in (0, 1):
        write_dataset(tmp_path / str(number), [[7 + number] * 500])
    reader = BatchReader(make_config([str(tmp_path / str(number)) for number in (0, 1)]))
    positions = np.arange(40)
    sources, _ = reader.locate(positions)
    assert set(sources.tolist()) == {0, 1}
    assert reader.read(positions).rows[:, 0].tolist() == (7 + sources).tolist()


def test_the_digest_of_a_range_is_that_of_its_batches(places: list[str]) -> None:
    config = make_config(places, digests=True)
    with TokenLoader(config) as loader:
        digests = [next(loader).digest for _ in range(40)]
        whole = loader.reader.digest(0, 40 * 12)
    total = sum(digest for digest in digests if digest is not None)
    assert total > 2**65  # It wraps around.
    assert whole == total % 2**64


def test_the_mixture_has_the_same_name_in_every_version(places: list[str]) -> None:
    """Checkpoints name it: with another, no run could be resumed."""
    assert (
        BatchReader(make_config(places)).identity["mixture"] == "a9d2a8dcb77d1368ceb559d530a57806"
    )
