"""Predictions and limits of a run before its first step, to compare with measurements."""

import msgspec

from paceline.core.plan import Estimate


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """Size, limits and predictions of a run."""

    num_steps: int
    tokens_per_step: int
    flops_per_step: float | None = None
    """FLOPs of all ranks, forward and backward; None for models whose FLOPs are not counted."""
    memory_bytes: int | None = None
    """Predicted peak of a step's tensors, on the rank that needs most memory."""
    step_time_s: float | None = None
    """Predicted from a calibration of the machine; None without one."""
    peak_flops_per_s: float | None = None
    """Peak FLOP/s of all ranks together; None if no document states it."""
    memory_limit_bytes: int | None = None
    """Memory that a rank may use; None if unknown."""
    final_loss: Estimate | None = None
    """Final loss, predicted from smaller runs; None without them."""

    def tokens_per_s(self, step_time_s: float) -> float:
        """Returns the throughput of all ranks, in tokens per second."""
        return self.tokens_per_step / step_time_s

    def utilization(self, step_time_s: float) -> float | None:
        """Returns the model FLOPs utilization (MFU) of a step; None if the peak is unknown."""
        if self.peak_flops_per_s is None or self.flops_per_step is None:
            return None
        return self.flops_per_step / step_time_s / self.peak_flops_per_s
