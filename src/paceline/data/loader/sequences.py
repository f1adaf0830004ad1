"""A run's stream as a map-style dataset, for loaders that have their own workers.

Grain and torch's DataLoader accept any object with a length and items. The stream is already
shuffled: read the items in order, without shuffling. The position is then all the state needed to
resume.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.loader.batches import BatchReader
from paceline.data.loader.config import LoaderConfig

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
