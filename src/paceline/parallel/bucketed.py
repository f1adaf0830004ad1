"""One all-reduce per bucket of gradients, each while backward goes on.

Phases: during backward, a bucket's all-reduce starts when its gradients are complete and the
buckets before it have started; after backward, all are waited for. Large buckets save calls,
small ones leave less to wait for in the end.
"""

from typing import Any, Literal

from torch import nn

from paceline.core.errors import UsageError
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.synchronization import Launch


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
        cap_bytes = None if bucket_size_mb is None else float(bucket_size_mb) * 2**20
        if cap_bytes is not None and not cap_bytes > 0:
            raise UsageError(f"bucket_size_mb must be positive, got {bucket_size_mb}")
        super().__init__(module, cap_bytes=cap_bytes, launch=Launch.WHEN_READY, **keywords)
