"""One all-reduce per bucket of gradients, each while backward goes on.

Phases: during backward, a bucket's all-reduce starts when its gradients are complete and the
buckets before it have started; after backward, all are waited for. Large buckets save calls,
small ones leave less to wait for in the end.
"""

import logging
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from paceline.core.errors import UsageError
from paceline.core.units import MIB
from paceline.parallel.bucket_size import FIRST_SIZE_MB, BucketSizeChoice, BucketSizeTuner
from paceline.parallel.buckets import tensor_spec
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.synchronization import GradientSynchronizer, Launch

_logger = logging.getLogger(__name__)


class BucketedDataParallel(DataParallel):
    """Averages bucket by bucket during backward; further keywords as in `DataParallel`.

    Args:
        module: The model.
        bucket_size_mb: Largest bucket in MiB (2^20 bytes, as torch counts); None for one bucket
            per dtype; "auto" to measure the group, watch the first steps, and choose.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | Literal["auto"] | None = 25.0,
        **keywords: Any,
    ) -> None:
        size_mb = FIRST_SIZE_MB if bucket_size_mb == "auto" else bucket_size_mb
        if size_mb is not None and not (isinstance(size_mb, (int, float)) and size_mb > 0):
            raise UsageError(
                f'bucket_size_mb must be a positive number, None or "auto", got {bucket_size_mb!r}'
            )
        cap_bytes = None if size_mb is None else size_mb * MIB
        super().__init__(module, cap_bytes=cap_bytes, launch=Launch.WHEN_READY, **keywords)
        self.bucket_size_choice: BucketSizeChoice | None = None
        """What "auto" chose and why; None before it has, and without it."""
        self._tuner: BucketSizeTuner | None = None
        self._watched: GradientSynchronizer | None = None
        if bucket_size_mb == "auto" and self.is_distributed:
            self._tuner = BucketSizeTuner(self.process_group, self._device)

    def _follow_changes(self) -> None:
        super()._follow_changes()
        if self._tuner is not None:
            self._tune(self._tuner)

    def _tune(self, tuner: BucketSizeTuner) -> None:
        synchronizer = self._synchronizer
        assert synchronizer is not None
        if synchronizer is not self._watched:
            # The first step, or other parameters are trained than before.
            self._watched = synchronizer
            synchronizer.records_arrivals = True
            tuner.forget()
        elif synchronizer.num_runs > tuner.num_observed:
            tuner.observe(synchronizer.arrivals_s())
        if not tuner.has_seen_enough:
            return
        choice = tuner.choose([tensor_spec(*named) for named in self._trained()])
        if dist.get_rank(self.process_group) == 0:
            _logger.info("%s", choice.explain())
        self._tuner = self._watched = None
        self.bucket_size_choice = choice
        self._cap_bytes = choice.bucket_size_mb * MIB
        self._build()
