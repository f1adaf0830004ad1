"""The endless stream of one source: a sequence of epochs, each with a different order.

Position i of the stream is in epoch i // N and holds the sample that the permutation keyed by seed
and epoch puts at i % N. Each sample occurs exactly once per epoch. Any position is found in
constant time and nothing is stored, so a run resumes anywhere immediately.
"""

import numpy as np

from paceline.core.errors import UsageError
from paceline.data.sampling.hashing import UInt64Array, derive, key_of
from paceline.data.sampling.permutation import IndexArray, permute

_BLOCKS, _SHORT_BLOCK, _WITHIN = range(3)
"""Purposes for which keys are derived from the key of an epoch."""


class SampleOrder:
    """The order of the samples of one source.

    Without a window, any sample may follow any other. With a window, an epoch visits blocks of
    `window` consecutive samples in random order and shuffles within each block, so a cache that
    holds the shards of one or two blocks is sufficient.

    Args:
        num_samples: Samples in an epoch.
        seed: Random seed; determines the order together with `source`.
        source: Number of the source in its mixture, so that equal sources differ in order.
        window: Samples in a block; None shuffles whole epochs.
    """

    def __init__(
        self, num_samples: int, *, seed: int, source: int = 0, window: int | None = None
    ) -> None:
        if num_samples < 1:
            raise UsageError(
                "no samples: a sample is one token longer than the context; use more text"
            )
        if window is not None and window < 1:
            raise UsageError(f"a window of {window} samples is empty; give 1 or more")
        self.num_samples = num_samples
        self.window = window if window is not None and window < num_samples else None
        self._key = key_of((seed, source))

    def samples_at(self, positions: IndexArray) -> IndexArray:
        """Returns the sample at each position of the stream."""
        if not positions.size:
            return positions
        epochs, indices = np.divmod(positions, self.num_samples)
        # Almost always all positions are in one epoch and share one key.
        is_one = bool((epochs == epochs[0]).all())
        keys = derive(self._key, epochs[:1] if is_one else epochs)
        if self.window is None:
            return permute(indices, self.num_samples, keys)
        return self._windowed(indices, self.window, keys)

    def _windowed(self, indices: IndexArray, window: int, keys: UInt64Array) -> IndexArray:
        num_blocks, num_rest = divmod(self.num_samples, window)
        # The short block with the last samples is visited at a random place in the epoch.
        places = derive(keys, _SHORT_BLOCK) % np.uint64(num_blocks + 1)
        short_start = places.astype(np.int64) * window
        is_after = indices >= short_start + num_rest
        is_short = (indices >= short_start) & ~is_after
        among_full = indices - np.where(is_after, num_rest, 0)
        slots, offsets = np.divmod(among_full, window)
        slots[is_short] = 0  # Any valid slot: the result is overwritten below.
        blocks = permute(slots, num_blocks, derive(keys, _BLOCKS))
        within_keys = derive(keys, _WITHIN)
        samples = blocks * window + permute(offsets, window, derive(within_keys, blocks))
        if is_short.any():
            short_keys = np.broadcast_to(derive(within_keys, num_blocks), indices.shape)[is_short]
            short_offsets = (indices - short_start)[is_short]
            samples[is_short] = num_blocks * window + permute(short_offsets, num_rest, short_keys)
        return samples
