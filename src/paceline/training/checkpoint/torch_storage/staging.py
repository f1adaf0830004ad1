"""What a rank is about to write, copied to host memory, so that training goes on meanwhile.

The copies live on from save to save: their memory is asked for once, and on CUDA it is pinned, so
that the device copies without the host.
"""

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex


class HostBuffers:
    """Memory for this rank's part of a checkpoint, by tensor and chunk."""

    def __init__(self) -> None:
        self._kept: dict[MetadataIndex, Tensor] = {}

    def copy(self, tensors: dict[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Returns contiguous copies of tensors; those of the save before are overwritten."""
        copies: dict[MetadataIndex, Tensor] = {}
        devices: set[torch.device] = set()
        for index, tensor in tensors.items():
            copies[index] = self._room_for(index, tensor)
            copies[index].copy_(tensor, non_blocking=True)
            if tensor.device.type == "cuda":
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.synchronize(device)
        self._kept = copies
        return copies

    def _room_for(self, index: MetadataIndex, tensor: Tensor) -> Tensor:
        kept = self._kept.get(index)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        return torch.empty(
            tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
        )
