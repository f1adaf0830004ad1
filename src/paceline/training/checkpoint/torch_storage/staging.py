"""Copies a rank's part of a checkpoint to host memory, so that training continues during the write.

The buffers are allocated once and reused by every save. On CUDA they are pinned, so that the device
copies without the host.
"""

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex


class HostBuffers:
    """Host memory for this rank's part of a checkpoint, by tensor and chunk."""

    def __init__(self) -> None:
        self._kept: dict[MetadataIndex, Tensor] = {}

    def copy(self, tensors: dict[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Returns contiguous copies of tensors; overwrites those of the previous save."""
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
