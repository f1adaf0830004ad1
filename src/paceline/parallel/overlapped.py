"""One all-reduce per parameter, each while backward goes on.

Phases: during backward, a parameter's all-reduce starts when its gradient is complete; after
backward, all are waited for. What fits behind backward is hidden, but each parameter pays a
call's cost.
"""

from typing import Any

from torch import nn

from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.settings import Launch


class OverlappedDataParallel(DataParallel):
    """Averages parameter by parameter during backward; keywords as in `DataParallel`.

    Args:
        module: The model.
        keywords: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=0, launch=Launch.WHEN_READY, **keywords)
