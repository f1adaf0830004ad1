"""Adapters that pack documents of other libraries into batches.

Hugging Face datasets and Grain read, filter and shuffle by themselves and have their own state.
`PackedDocuments` takes documents of token ids from any of them, concatenates them and cuts
sequences. Its state contains the library's own state: for a document that was cut, the state before
that document and the number of its tokens already used, never the tokens.
"""

import collections
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UsageError
from paceline.data.audit import samples_digest
from paceline.data.loader.batches import Batch, document_positions

_SCHEMA = 1


class PackedDocuments:
    """Batches of one rank, packed from documents.

    Args:
        documents: An iterable of documents. To be resumable, it or its iterator needs state_dict
            and load_state_dict (Hugging Face datasets), or its iterator needs get_state and
            set_state (Grain). Each rank needs different documents.
        context_length: Tokens in a sequence, without the last target.
        batch_size: Sequences of this rank per step.
        end_of_document: Token to append to each document; None if documents already end with it.
        tokens_of: Maps an item of `documents` to its token ids; by default, items are token ids.
        document_boundaries: Whether batches also have each token's position in its document and
            the document's number.
    """

    def __init__(
        self,
        documents: Iterable[Any],
        *,
        context_length: int,
        batch_size: int,
        end_of_document: int | None,
        tokens_of: Callable[[Any], Sequence[int] | npt.NDArray[np.integer[Any]]] = lambda item: (
            item
        ),
        document_boundaries: bool = False,
    ) -> None:
        self._documents = documents
        self._context_length = context_length
        self._batch_size = batch_size
        self._end_of_document = end_of_document
        self._tokens_of = tokens_of
        self._document_boundaries = document_boundaries
        self._iterator: Iterator[Any] | None = None
        # Documents with unused tokens, each with the state from before it was read.
        self._pending: collections.deque[tuple[Any, npt.NDArray[np.int64]]] = collections.deque()
        self._num_used = 0
        self._num_pending = 0
        self._step = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        num_tokens = self._batch_size * self._context_length
        while self._num_pending - self._num_used < num_tokens + 1:
            self._read_document()
        stream = np.concatenate([tokens for _, tokens in self._pending])[self._num_used :]
        starts = None
        if self._document_boundaries:
            ends = np.cumsum([len(tokens) for _, tokens in self._pending]) - self._num_used
            marks = np.zeros(num_tokens, dtype=np.bool_)
            marks[ends[ends < num_tokens]] = True
            starts = marks.reshape(self._batch_size, self._context_length)
            starts[:, 0] = False
        rows = np.lib.stride_tricks.sliding_window_view(stream, self._context_length + 1)
        rows = rows[: num_tokens : self._context_length].copy()
        first = self._step * self._batch_size
        positions = np.arange(first, first + self._batch_size)
        batch = Batch(
            rows=rows,
            positions=None if starts is None else document_positions(starts),
            document_ids=None if starts is None else np.cumsum(starts, axis=1),
            step=self._step,
            first_sample=first,
            digest=samples_digest(positions, np.zeros_like(positions), rows),
        )
        self._use(num_tokens)
        self._step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the library's state before the current document, and the tokens used of it."""
        before = self._pending[0][0] if self._pending else self._library_state()
        return {
            "schema": _SCHEMA,
            "documents": before,
            "num_tokens_used": self._num_used,
            "step": self._step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from the `state` of another instance."""
        documents = copy.deepcopy(state["documents"])
        self._iterator = None
        if hasattr(self._documents, "load_state_dict"):
            self._documents.load_state_dict(documents)
        else:
            iterator = self._open()
            if hasattr(iterator, "set_state"):
                iterator.set_state(documents)
            elif hasattr(iterator, "load_state_dict"):
                iterator.load_state_dict(documents)
            else:
                raise UsageError(f"cannot resume: {self._without_state()}")
        self._pending.clear()
        self._num_pending = 0
        self._num_used = state["num_tokens_used"]
        self._step = state["step"]

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._documents)
        return self._iterator

    def _read_document(self) -> None:
        iterator = self._open()
        state = self._library_state(required=False)
        tokens = np.asarray(self._tokens_of(next(iterator)), dtype=np.int64)
        if self._end_of_document is not None:
            tokens = np.append(tokens, self._end_of_document)
        if len(tokens):
            self._pending.append((state, tokens))
            self._num_pending += len(tokens)

    def _use(self, num_tokens: int) -> None:
        self._num_used += num_tokens
        while self._pending and self._num_used >= len(self._pending[0][1]):
            _, tokens = self._pending.popleft()
            self._num_used -= len(tokens)
            self._num_pending -= len(tokens)

    def _library_state(self, *, required: bool = True) -> Any:
        for holder in (self._open(), self._documents):
            for name in ("get_state", "state_dict"):
                if hasattr(holder, name):
                    return copy.deepcopy(getattr(holder, name)())
        if required:
            raise UsageError(f"cannot save the state: {self._without_state()}")
        return None

    def _without_state(self) -> str:
        return (
            f"{type(self._documents).__name__} has neither state_dict and load_state_dict nor an "
            "iterator with get_state and set_state; wrap it in one that has"
        )
