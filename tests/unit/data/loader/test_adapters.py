"""Tests that documents of other libraries give the same batches, and resume by their own state."""

import itertools
import json
import pathlib
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.data.loader.adapters import PackedDocuments
from paceline.data.loader.batches import BatchReader
from paceline.data.loader.config import LoaderConfig, SourceConfig
from tests.unit.data.dataset_factory import END_OF_DOCUMENT, random_documents, write_dataset

LENGTH, BATCH = 8, 3


class GrainLike:
    """An iterator with `get_state` and `set_state`, as in Grain."""

    def __init__(self, documents: list[list[int]]) -> None:
        self._documents = documents
        self._next = 0

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if self._next == len(self._documents):
            raise StopIteration
        self._next += 1
        return self._documents[self._next - 1]

    def get_state(self) -> dict[str, int]:
        return {"next": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def pack(documents: Any, **options: Any) -> PackedDocuments:
    settings = {"context_length": LENGTH, "batch_size": BATCH, "end_of_document": END_OF_DOCUMENT}
    return PackedDocuments(documents, **{**settings, **options})


@settings(max_examples=50, deadline=None)
@given(
    num_tokens=st.integers(30, 400), longest=st.sampled_from([1, 5, 70]), pieces=st.integers(1, 5)
)
def test_resumed_pieces_are_one_uninterrupted_run(
    num_tokens: int, longest: int, pieces: int
) -> None:
    documents = random_documents(num_tokens, longest=longest)
    whole = list(pack(GrainLike(documents)))
    tokens = [token for each in documents for token in (*each, END_OF_DOCUMENT)]
    assert len(whole) == (num_tokens - 1) // (LENGTH * BATCH)
    for number, row in enumerate(itertools.chain.from_iterable(batch.rows for batch in whole)):
        assert row.tolist() == tokens[number * LENGTH : number * LENGTH + LENGTH + 1]
    resumed, state = [], None
    while len(resumed) < len(whole):
        packed = pack(GrainLike(documents))
        if state is not None:
            packed.load_state_dict(state)
        resumed.extend(itertools.islice(packed, pieces))
        state = pickle.loads(pickle.dumps(packed.state_dict()))
    assert [batch.rows.tolist() for batch in resumed] == [batch.rows.tolist() for batch in whole]
    assert [batch.step for batch in resumed] == list(range(len(whole)))


def test_boundaries_are_those_of_a_prepared_dataset(tmp_path: pathlib.Path) -> None:
    documents = random_documents(200)
    write_dataset(tmp_path, documents)
    source = SourceConfig(place=str(tmp_path))
    reader = BatchReader(
        LoaderConfig(
            sources=(source,), context_length=LENGTH, batch_size=1, document_boundaries=True
        )
    )
    (num_samples,) = reader.num_samples
    prepared = reader.read(np.arange(num_samples))
    in_order = np.argsort(reader.locate(np.arange(num_samples))[1])
    packed = next(pack(GrainLike(documents), batch_size=num_samples, document_boundaries=True))
    for name in ("rows", "positions", "document_ids"):
        assert getattr(packed, name).tolist() == getattr(prepared, name)[in_order].tolist()


def test_an_end_is_put_after_each_document() -> None:
    batch = next(pack(iter([[1, 2], [], [3]] * 9), end_of_document=0))
    assert batch.rows[0].tolist() == [1, 2, 0, 0, 3, 0, 1, 2, 0]


def test_documents_without_a_state_are_named() -> None:
    packed = pack(iter([[1] * 50]))
    next(packed)
    assert packed.state_dict()["documents"] is None
    with pytest.raises(UsageError, match="list_iterator has neither state_dict"):
        pack(iter([[1]])).state_dict()
    with pytest.raises(UsageError, match="cannot resume: list_iterator"):
        pack(iter([[1]])).load_state_dict(packed.state_dict())


def _check_resumes(make: Any, **options: Any) -> None:
    whole = list(itertools.islice(pack(make(), **options), 12))
    first = pack(make(), **options)
    taken = list(itertools.islice(first, 5))
    second = pack(make(), **options)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    taken += itertools.islice(second, 7)
    assert [batch.rows.tolist() for batch in taken] == [batch.rows.tolist() for batch in whole]


@pytest.mark.slow
def test_hugging_face_datasets_resume(tmp_path: pathlib.Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the adapter for Hugging Face datasets")
    documents = random_documents(2000)
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"input_ids": each}) + "\n" for each in documents))

    def make() -> Any:
        return datasets.load_dataset(
            "json", data_files=str(path), split="train", streaming=True, cache_dir=str(tmp_path)
        )

    _check_resumes(make, tokens_of=lambda item: item["input_ids"])


@pytest.mark.slow
def test_grain_iterators_resume() -> None:
    grain = pytest.importorskip("grain", reason="the adapter for Grain")
    documents = random_documents(2000)

    def make() -> Any:
        return grain.MapDataset.source(documents).shuffle(seed=3).to_iter_dataset()

    _check_resumes(make)


@pytest.mark.slow
def test_grain_reads_sequences(tmp_path: pathlib.Path) -> None:
    grain = pytest.importorskip("grain", reason="the adapter for Grain")
    from paceline.data.loader.batches import TokenSequences

    write_dataset(tmp_path, random_documents(401))
    source = SourceConfig(place=str(tmp_path))
    sequences = TokenSequences(
        LoaderConfig(sources=(source,), context_length=LENGTH, batch_size=BATCH)
    )
    batches = iter(grain.MapDataset.source(sequences).batch(BATCH).to_iter_dataset())
    first, state = next(batches), batches.get_state()
    second = next(batches)
    expected = np.stack([sequences[position]["tokens"] for position in range(2 * BATCH)])
    assert np.concatenate([first["tokens"], second["tokens"]]).tolist() == expected.tolist()
    batches.set_state(state)
    assert next(batches)["tokens"].tolist() == second["tokens"].tolist()


class ResumableList:
    """Documents with a state of their own, as of a dataset of Hugging Face."""

    def __init__(self, documents: list[list[int]]) -> None:
        self._documents = documents
        self._next = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self._next < len(self._documents):
            self._next += 1
            yield self._documents[self._next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class IteratorWithState(GrainLike):
    """An iterator with `state_dict` and `load_state_dict`, as in torchdata."""

    get_state = None  # type: ignore[assignment]
    set_state = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name in ("get_state", "set_state"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Iterable:
    """Documents whose iterator has the state."""

    def __init__(self, documents: list[list[int]]) -> None:
        self._documents = documents

    def __iter__(self) -> Iterator[list[int]]:
        return IteratorWithState(self._documents)


@pytest.mark.parametrize("library", [GrainLike, ResumableList, Iterable])
def test_a_loader_goes_back_to_a_state(library: Any) -> None:
    packed = pack(library(random_documents(600, longest=11)))
    for _ in range(3):
        next(packed)
    state = pickle.loads(pickle.dumps(packed.state_dict()))
    after = [next(packed).rows.tolist() for _ in range(4)]
    packed.load_state_dict(state)
    again = [next(packed) for _ in range(4)]
    assert [batch.rows.tolist() for batch in again] == after
    assert [(batch.step, batch.first_sample) for batch in again] == [
        (3, 9), (4, 12), (5, 15), (6, 18)
    ]  # fmt: skip


def test_a_batch_needs_one_token_more_than_it_has() -> None:
    tokens = list(range(1, LENGTH * BATCH + 1))
    (only,) = pack([tokens])  # And the end of the document.
    assert only.rows[-1].tolist() == [*tokens[-LENGTH:], END_OF_DOCUMENT]
    assert list(pack([tokens[:-1]])) == []


def test_documents_may_end_with_a_batch() -> None:
    first = [1] * (LENGTH * BATCH - 1)
    documents = [first, [2] * 5, [3] * (2 * LENGTH * BATCH)]
    packed = pack(documents, document_boundaries=True)
    whole, second = next(packed), next(packed)
    assert whole.document_ids is not None
    assert whole.document_ids.tolist() == [[0] * LENGTH] * BATCH
    assert second.document_ids is not None
    assert second.document_ids.tolist() == [[0] * 6 + [1] * 2, [0] * LENGTH, [0] * LENGTH]
