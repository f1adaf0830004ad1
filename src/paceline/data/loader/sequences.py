"""A run's stream as a map from position to sequence, for loaders that bring their own workers.

Grain and torch's DataLoader take any object with a length and items. The order is in the stream
already: take the items as they come, without shuffling, and a position is all there is to resume.
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
    """Sequences by position of the stream; opened anew in each worker.

    Args:
        config: The datasets and their order; batch size and prefetch do not matter here.
        num_samples: The length; by default as many as the sources have in an epoch, together.
    """

    def __init__(self, config: LoaderConfig, *, num_samples: int | None = None) -> None:
        self.config = config
        self._reader: BatchReader | None = None
        self._num_samples = num_samples or sum(self.reader.num_samples)

    @property
    def reader(self) -> BatchReader:
        """Reads the samples."""
        if self._reader is None:
            self._reader = BatchReader(dataclasses.replace(self.config, digests=False))
        return self._reader

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: int) -> SequenceArrays:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[SequenceArrays]:
        """Returns several sequences, which need not be consecutive; torch asks for a batch so."""
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
        return {**self.__dict__, "_reader": None}  # Maps of files do not travel to workers.
