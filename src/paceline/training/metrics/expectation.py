"""What is known of a run before its first step, to be laid beside what is measured."""

import msgspec

from paceline.core.plan import Estimate


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a run, what it may use, and what it is predicted to take."""

    num_steps: int
    tokens_per_step: int
    flops_per_step: float | None = None
    """Of all ranks, in forward and backward; None for models that are counted by nobody."""
    memory_bytes: int | None = None
    """Predicted for the tensors of the rank that holds most, at the peak of a step."""
    step_time_s: float | None = None
    """Predicted from a calibration of the machine; None without one."""
    peak_flops_per_s: float | None = None
    """Of all ranks together; None where no document states it."""
    memory_limit_bytes: int | None = None
    """What a rank may take; None where nobody knows."""
    final_loss: Estimate | None = None
    """Loss at the end, predicted from smaller runs; None without them."""

    def tokens_per_s(self, step_time_s: float) -> float:
        """Returns the tokens of all ranks per second."""
        return self.tokens_per_step / step_time_s

    def utilization(self, step_time_s: float) -> float | None:
        """Returns the model FLOPs utilization (MFU) of a step, where the peak is known."""
        if self.peak_flops_per_s is None or self.flops_per_step is None:
            return None
        return self.flops_per_step / step_time_s / self.peak_flops_per_s
