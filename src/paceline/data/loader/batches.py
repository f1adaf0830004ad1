"""The batch at any position of a run's stream, as a pure function of config and position.

Reading has no state. `TokenLoader` visits the positions in order, but ranks, workers, a resumed run
or an audit may read any of them. `TokenSequences` is the stream as a map-style dataset, for loaders
with workers of their own, such as Grain's and torch's. It is already shuffled: read its items in
order, without shuffling. The position is then all the state needed to resume.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

from paceline.core.errors import UsageError
from paceline.data.audit import AuditRow, audit_row, samples_digest
from paceline.data.loader.config import LoaderConfig
from paceline.data.loader.sources import open_sources, sources_digest
from paceline.data.sampling import IndexArray, SampleStream, slots_by_weight

TokenRows = npt.NDArray[np.int64]
Allocate = Callable[[tuple[int, int]], TokenRows]
"""Allocates an array of a batch: its tokens, or what is known of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The sequences of one rank in one step."""

    rows: TokenRows
    """One sequence per row: its context and its last target."""
    positions: npt.NDArray[np.int64] | None = None
    """Position of each token in its document, or in the part of it in this sequence."""
    document_ids: npt.NDArray[np.int64] | None = None
    """Document number of each token, from 0 in each sequence, to mask attention by document."""
    step: int
    """The step of the run."""
    first_sample: int
    """The first position of the stream in this batch."""
    digest: int | None = None
    """Digest of the samples; the digests of all ranks add up to the step's digest, modulo 2^64."""

    @property
    def tokens(self) -> TokenRows:
        """The model's inputs."""
        return self.rows[:, :-1]

    @property
    def targets(self) -> TokenRows:
        """The tokens to predict: the inputs shifted by one."""
        return self.rows[:, 1:]

    @property
    def num_samples(self) -> int:
        """Number of sequences in this batch."""
        return len(self.rows)

    @property
    def audit_row(self) -> AuditRow:
        """The row of this batch in an audit trail."""
        if self.digest is None:
            raise UsageError(
                "this batch has no digest to audit; set digests in the loader's config"
            )
        return audit_row(self.step, self.first_sample, self.num_samples, self.digest)


class BatchReader:
    """Reads any samples of a run's stream.

    Args:
        config: The datasets and their order.
        allocate: Allocates the arrays of a batch; NumPy's by default.
    """

    def __init__(self, config: LoaderConfig, *, allocate: Allocate | None = None) -> None:
        self.config = config
        self._allocate = allocate or _allocate
        self._sources = open_sources(config)
        weights = [source.weight for source in config.sources]
        self._stream = SampleStream(
            self.num_samples, weights=weights, seed=config.seed, window=config.window
        )
        slots = slots_by_weight(weights).astype("<i8").tobytes()
        self.identity: dict[str, str | int | None] = {
            "datasets": sources_digest(self._sources),
            "split": config.split,
            "mixture": blake3.blake3(slots).hexdigest(16),
            "context_length": config.context_length,
            "seed": config.seed,
            "window": config.window,
        }

    @property
    def num_samples(self) -> list[int]:
        """Samples in an epoch of each source."""
        return [source.samples.num_samples for source in self._sources]

    def locate(self, positions: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Returns the source and the sample at each position of the stream."""
        return self._stream.locate(positions)

    def fetch_ahead(self, sources: IndexArray, samples: IndexArray) -> None:
        """Starts to fetch the shards of samples, if they are not local."""
        for number, source in enumerate(self._sources):
            source.fetch_ahead(samples[sources == number])

    def read(
        self,
        positions: IndexArray,
        located: tuple[IndexArray, IndexArray] | None = None,
        *,
        step: int = 0,
    ) -> Batch:
        """Returns the samples at consecutive `positions`.

        Args:
            positions: Positions in the stream.
            located: The result of `locate` for them, if already known.
            step: The step of the batch.
        """
        sources, samples = located or self.locate(positions)
        rows = self._read_rows(sources, samples)
        starts = (
            self._document_starts(sources, samples) if self.config.document_boundaries else None
        )
        token_positions = document_ids = None
        if starts is not None:
            shape = len(starts), self.config.context_length
            token_positions = document_positions(starts, self._allocate(shape))
            document_ids = np.cumsum(starts, axis=1, out=self._allocate(shape))
        return Batch(
            rows=rows,
            positions=token_positions,
            document_ids=document_ids,
            step=step,
            first_sample=int(positions[0]),
            digest=samples_digest(positions, sources, rows) if self.config.digests else None,
        )

    def digest(self, first_sample: int, num_samples: int) -> int:
        """Returns the digest of a range of the stream, for `check_audit`."""
        total, end = 0, first_sample + num_samples
        for first in range(first_sample, end, self.config.batch_size):
            positions = np.arange(first, min(first + self.config.batch_size, end))
            sources, samples = self.locate(positions)
            total += samples_digest(positions, sources, self._read_rows(sources, samples))
        return total % 2**64

    def close(self) -> None:
        """Releases all files."""
        for source in self._sources:
            source.close()

    def _read_rows(self, sources: IndexArray, samples: IndexArray) -> TokenRows:
        rows = self._allocate((len(samples), self.config.context_length + 1))
        if len(self._sources) == 1:
            self._sources[0].samples.read(samples, rows)
            return rows
        for number, source in enumerate(self._sources):
            here = np.flatnonzero(sources == number)
            source.samples.read(samples[here], (rows[index] for index in here.tolist()))
        return rows

    def _document_starts(self, sources: IndexArray, samples: IndexArray) -> npt.NDArray[np.bool_]:
        starts = np.empty((len(samples), self.config.context_length), dtype=np.bool_)
        for number, source in enumerate(self._sources):
            is_here = sources == number
            starts[is_here] = source.samples.document_starts(samples[is_here])
        return starts


def _allocate(shape: tuple[int, int]) -> TokenRows:
    return np.empty(shape, dtype=np.int64)


def document_positions(
    starts: npt.NDArray[np.bool_], out: TokenRows | None = None
) -> npt.NDArray[np.int64]:
    """Returns each token's distance from the last document start, or from the start of its row."""
    indices = np.arange(starts.shape[1])
    begins = np.maximum.accumulate(np.where(starts, indices, 0), axis=1)
    return np.subtract(indices, begins, out=out)


SequenceArrays = dict[str, npt.NDArray[np.int64]]


class TokenSequences:
    """Sequences by position in the stream; each worker opens the files itself.

    Args:
        config: The datasets and their order; batch size and prefetch are ignored.
        num_samples: The length; by default the sum of one epoch of each source.
    """

    def __init__(self, config: LoaderConfig, *, num_samples: int | None = None) -> None:
        self.config = config
        self._reader: BatchReader | None = None
        self._num_samples = num_samples or sum(self.reader.num_samples)

    @property
    def reader(self) -> BatchReader:
        """The reader of the samples, opened on first use in each process."""
        if self._reader is None:
            self._reader = BatchReader(dataclasses.replace(self.config, digests=False))
        return self._reader

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: int) -> SequenceArrays:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[SequenceArrays]:
        """Returns several sequences, not necessarily consecutive; torch calls this per batch."""
        for position in positions:
            if not 0 <= position < self._num_samples:
                raise IndexError(f"position {position} of {self._num_samples}")
        batch = self.reader.read(np.asarray(positions, dtype=np.int64))
        arrays = {"tokens": batch.tokens, "targets": batch.targets}
        if batch.positions is not None and batch.document_ids is not None:
            arrays |= {"positions": batch.positions, "document_ids": batch.document_ids}
        return [
            {name: array[number] for name, array in arrays.items()}
            for number in range(batch.num_samples)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}  # Memory maps cannot be sent to workers.
