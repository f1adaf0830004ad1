"""What a rank's gradients count for in an average, known on the device and not on the host.

Reading the sum of all weights would make the program wait for the device in every backward pass, so
it stays a tensor, and so does the factor that is made of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_SMALL_ELEMENTS = 2**14
"""Up to so many, calls for one tensor cost more than a second pass over its memory."""


class RankWeight:
    """A factor of this rank's gradients.

    Args:
        factor: A number, or a tensor without dimensions on the gradients' device.
        is_void: On a rank whose own weight is zero, a tensor that says whether it counts for
            nothing; it does unless all ranks' are.
    """

    def __init__(self, factor: float | Tensor, is_void: Tensor | None = None) -> None:
        self._factor = factor
        self._is_void = is_void

    @classmethod
    def of(cls, own: float, total: Tensor, num_ranks: int) -> "RankWeight":
        """Returns a weight's part of the sum of all ranks' weights; if that is zero, all are alike.

        Args:
            own: This rank's weight.
            total: The sum over the ranks.
            num_ranks: How many there are.
        """
        is_counted = total > 0
        factor = torch.where(is_counted, own / total, 1 / num_ranks)
        return cls(factor, is_counted if own == 0 else None)

    def scale(self, tensors: list[Tensor]) -> None:
        """Multiplies tensors in place; where this rank counts for nothing, they become zero."""
        torch._foreach_mul_(tensors, self._factor)
        if self._is_void is not None:
            for tensor in tensors:
                tensor.masked_fill_(self._is_void, 0)  # Zero times what is not finite is not zero.

    def scale_into(self, gradients: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Writes multiples of gradients to tensors of the same shapes.

        Small ones are copied and multiplied together, because each call costs more than what it
        does; large ones in one pass over memory each. In a wider dtype they are multiplied as
        copies, and on the way to a narrower one, so that each number is rounded once.
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
