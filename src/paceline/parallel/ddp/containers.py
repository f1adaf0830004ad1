"""The four averaging containers, from the simplest to the one to use.

All average the same gradients; they differ in how these are cut into messages and when the messages
start.

1. `NaiveDataParallel`: backward; then for each parameter in reverse order: all-reduce, wait. The
   simplest container that is right, and the baseline of the others: it pays a call's latency per
   parameter and overlaps nothing.
2. `FlatDataParallel`: backward, during which gradients are gathered in one buffer; then one
   all-reduce of it (one per dtype). A call's latency is paid once, and nothing is overlapped.
3. `OverlappedDataParallel`: during backward, a parameter's all-reduce starts when its gradient is
   complete; after backward, all are waited for. What fits behind backward is hidden, but each
   parameter pays a call's latency.
4. `BucketedDataParallel`: during backward, a bucket's all-reduce starts when its gradients are
   complete and the buckets before it have started; after backward, all are waited for. Large
   buckets save calls, small ones leave less exposed in the end.

With an automatic bucket size, the first steps are watched; at the end of the last of them, when all
ranks are there, they agree on a size, and the next pass begins with new buckets.
"""

import logging
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from paceline.core.strategies import DEFAULT_BUCKET_SIZE_MB
from paceline.core.units import MIB
from paceline.parallel.buckets import tensor_spec
from paceline.parallel.ddp.bucket_size import BucketSizeChoice, BucketSizeTuner
from paceline.parallel.reducer.base import DataParallel, bucket_cap_bytes
from paceline.parallel.reducer.settings import LaunchPolicy

_logger = logging.getLogger(__name__)


class NaiveDataParallel(DataParallel):
    """Averages parameter by parameter after backward; keywords as in `DataParallel`.

    Args:
        module: The model.
        keywords: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=0, launch=LaunchPolicy.ONE_BY_ONE, **keywords)


class FlatDataParallel(DataParallel):
    """Averages all gradients at once after backward; keywords as in `DataParallel`.

    Args:
        module: The model.
        keywords: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=None, launch=LaunchPolicy.AFTER_BACKWARD, **keywords)


class OverlappedDataParallel(DataParallel):
    """Averages parameter by parameter during backward; keywords as in `DataParallel`.

    Args:
        module: The model.
        keywords: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=0, launch=LaunchPolicy.WHEN_READY, **keywords)


class BucketedDataParallel(DataParallel):
    """Averages bucket by bucket during backward; further keywords as in `DataParallel`.

    Args:
        module: The model.
        bucket_size_mb: Largest bucket in MiB (2^20 bytes, as torch counts); None for one bucket
            per dtype; "auto" to measure the group, watch the first steps, and choose.
        keywords: As in `DataParallel`: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | Literal["auto"] | None = DEFAULT_BUCKET_SIZE_MB,
        **keywords: Any,
    ) -> None:
        size_mb = DEFAULT_BUCKET_SIZE_MB if bucket_size_mb == "auto" else bucket_size_mb
        cap_bytes = bucket_cap_bytes(size_mb)
        self.bucket_size_choice: BucketSizeChoice | None = None
        """What "auto" chose and why; None before it has, and without it."""
        self._tuner: BucketSizeTuner | None = None
        self._has_new_size = False
        super().__init__(module, cap_bytes=cap_bytes, launch=LaunchPolicy.WHEN_READY, **keywords)
        if bucket_size_mb == "auto" and self.is_distributed:
            self._tuner = BucketSizeTuner(self._settings)
            self._watch(self._tuner)

    def _follow_changes(self, *, agree: bool) -> None:
        num_builds = self._num_builds
        super()._follow_changes(agree=agree)
        if self._has_new_size:
            self._has_new_size = False
            self._build()
        if self._tuner is not None and self._num_builds > num_builds:
            self._watch(self._tuner)

    def _watch(self, tuner: BucketSizeTuner) -> None:
        """Lets the tuner see the steps of the present buckets, from the first one on."""
        assert self._synchronizer is not None
        tuner.forget()
        self._synchronizer.records_times = True

    def _settle(self) -> None:
        super()._settle()
        if self._tuner is not None:
            self._learn(self._tuner)

    def _learn(self, tuner: BucketSizeTuner) -> None:
        """Takes in a step, and chooses when enough have been seen."""
        assert self._synchronizer is not None
        arrivals_s = self._synchronizer.arrivals_s()
        if not arrivals_s:
            return
        tuner.observe(arrivals_s)
        if not tuner.has_seen_enough:
            return
        choice = tuner.choose([tensor_spec(*named) for named in self._trained()])
        if dist.get_rank(self.process_group) == 0:
            _logger.info("%s", choice.explain())
        self._tuner = None
        self.bucket_size_choice = choice
        self._cap_bytes = choice.bucket_size_mb * MIB
        self._has_new_size = True
