"""The outer optimizer: SGD with Nesterov momentum, on averages of outer gradients.

Every operation rounds on its own. A fused multiply-add would save a pass, but rounds as the device
at hand does, and sites with other devices would end with other bits.
"""

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterUpdate:
    """An update as torch.optim.SGD's with `nesterov`, which leaves what it is given as it was."""

    learning_rate: float
    momentum: float

    def __call__(
        self, values: Tensor, velocity: Tensor | None, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the new values and the new velocity.

        Args:
            values: The parameters that the sites have in common.
            velocity: The sum of earlier gradients, each weighted by a power of the momentum; None
                without momentum.
            gradient: The averaged outer gradient, in float32.
        """
        step = gradient
        if velocity is not None:
            velocity = velocity.mul(self.momentum).add_(gradient)
            step = velocity.mul(self.momentum).add_(gradient)
        return values.sub(step.mul(self.learning_rate)), velocity
