"""The four containers that average gradients, from the simplest to the recommended one.

All average the same gradients. They differ in how gradients are divided into messages and when the
messages start.

1. `NaiveDataParallel`: backward; then for each parameter in reverse order: all-reduce, wait. The
   simplest correct container, and the baseline of the others: it pays the latency of one call per
   parameter and overlaps nothing.
2. `FlatDataParallel`: backward collects gradients in one buffer; then one all-reduce of the buffer
   (one per dtype). It pays the latency of one call and overlaps nothing.
3. `OverlappedDataParallel`: during backward, a parameter's all-reduce starts when its gradient is
   complete; after backward, it waits for all. Backward hides communication, but each parameter
   pays the latency of one call.
4. `BucketedDataParallel`: during backward, a bucket's all-reduce starts when its gradients are
   complete and the buckets before it have started; after backward, it waits for all. Large buckets
   need fewer calls, small ones leave less communication exposed after backward.

With an automatic bucket size, the container observes the first steps. At the end of the last of
them, where all ranks synchronise anyway, the ranks agree on a size, and the next pass begins with
new buckets.
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
    """Averages gradients one parameter at a time after backward.

    Args:
        module: The model.
        keywords: As in `DataParallel`: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=0, launch=LaunchPolicy.ONE_BY_ONE, **keywords)


class FlatDataParallel(DataParallel):
    """Averages all gradients in one message per dtype after backward.

    Args:
        module: The model.
        keywords: As in `DataParallel`: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=None, launch=LaunchPolicy.AFTER_BACKWARD, **keywords)


class OverlappedDataParallel(DataParallel):
    """Averages gradients one parameter at a time during backward.

    Args:
        module: The model.
        keywords: As in `DataParallel`: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=0, launch=LaunchPolicy.WHEN_READY, **keywords)


class BucketedDataParallel(DataParallel):
    """Averages gradients one bucket at a time during backward.

    Args:
        module: The model.
        bucket_size_mb: Largest bucket in MiB (2^20 bytes, as torch counts); None for one bucket
            per dtype; "auto" to choose from measurements of the group and the first steps.
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
        """The choice of "auto" and its reasons; None before the choice, and without "auto"."""
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
        """Restarts the tuner's observation with the first step of the current buckets."""
        assert self._synchronizer is not None
        tuner.forget()
        self._synchronizer.records_times = True

    def _settle(self) -> None:
        super()._settle()
        if self._tuner is not None:
            self._learn(self._tuner)

    def _learn(self, tuner: BucketSizeTuner) -> None:
        """Records the last step, and chooses a size when enough steps have been observed."""
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
