"""One all-reduce per parameter, one after the other, when backward is over.

Phases: backward; then for each parameter in reverse order: all-reduce, wait. The simplest
container that is right, and the one that others are compared with: it pays a call's cost per
parameter and hides nothing.
"""

from typing import Any

from torch import nn

from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.settings import Launch


class NaiveDataParallel(DataParallel):
    """Averages parameter by parameter after backward; keywords as in `DataParallel`.

    Args:
        module: The model.
        keywords: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=0, launch=Launch.ONE_BY_ONE, **keywords)
