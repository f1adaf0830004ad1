"""One all-reduce of all gradients, when backward is over.

Phases: backward, during which gradients are gathered in one buffer; then one all-reduce of it
(one per dtype). A call's cost is paid once, and nothing is hidden.
"""

from typing import Any

from torch import nn

from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.settings import Launch


class FlatDataParallel(DataParallel):
    """Averages all gradients at once after backward; keywords as in `DataParallel`.

    Args:
        module: The model.
        keywords: process_group, reduction_dtype, broadcast_buffers.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, cap_bytes=None, launch=Launch.AFTER_BACKWARD, **keywords)
