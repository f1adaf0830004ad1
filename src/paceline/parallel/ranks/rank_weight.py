"""The weight of a rank's gradients in an average, kept on the device.

Reading the sum of all weights on the host would wait for the device in every backward pass, so the
sum and the factor computed from it stay tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_SMALL_ELEMENTS = 2**14
"""Up to this size, a call per tensor costs more than a second pass over its memory."""


class RankWeight:
    """A scale factor for this rank's gradients.

    Args:
        factor: A number, or a zero-dimensional tensor on the gradients' device.
        is_void: On a rank with weight zero, a boolean tensor that is true unless all ranks have
            weight zero: the rank's gradients are then replaced with zeros.
    """

    def __init__(self, factor: float | Tensor, is_void: Tensor | None = None) -> None:
        self._factor = factor
        self._is_void = is_void

    @classmethod
    def of(cls, own: float, total: Tensor, num_ranks: int) -> "RankWeight":
        """Returns a weight's share of the sum of all weights; equal shares if the sum is zero.

        Args:
            own: This rank's weight.
            total: The sum of all ranks' weights.
            num_ranks: Number of ranks.
        """
        is_counted = total > 0
        factor = torch.where(is_counted, own / total, 1 / num_ranks)
        return cls(factor, is_counted if own == 0 else None)

    def scale(self, tensors: list[Tensor]) -> None:
        """Scales tensors in place; sets them to zero if this rank has weight zero."""
        torch._foreach_mul_(tensors, self._factor)
        if self._is_void is not None:
            for tensor in tensors:
                tensor.masked_fill_(self._is_void, 0)  # Zero times inf or NaN is NaN, not zero.

    def scale_into(self, gradients: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Writes scaled gradients to tensors of the same shapes.

        Small gradients are copied and scaled as a group, because a call per tensor would dominate
        their cost. Large gradients are scaled in one pass over memory each. To round each number
        only once, gradients are scaled after the copy to a wider dtype, but before the conversion
        to a narrower one.
        """
        together: list[tuple[Tensor, Tensor]] = []
        for gradient, target in zip(gradients, targets, strict=True):
            change = target.dtype.itemsize - gradient.dtype.itemsize
            if change > 0 or (change == 0 and gradient.numel() <= _SMALL_ELEMENTS):
                together.append((gradient, target))
            else:
                torch.mul(gradient, self._factor, out=target)
                if self._is_void is not None:
                    target.masked_fill_(self._is_void, 0)
        if together:
            copies = [target for _, target in together]
            torch._foreach_copy_(copies, [gradient for gradient, _ in together])
            self.scale(copies)
