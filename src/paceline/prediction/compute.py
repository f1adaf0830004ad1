"""Predicted forward and backward time on a calibrated machine, segment by segment."""

import dataclasses
from typing import NamedTuple

from paceline.accounting.step_work import ModelSegment, model_segments
from paceline.core.specs import BatchShape, ModelShape
from paceline.prediction.calibration import Calibration, attention_work, linear_work, nearest_times


class SegmentTime(NamedTuple):
    """Seconds of one segment's forward or backward pass, by term."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    launch_s: float
    """Cost of launching operators, independent of their size."""

    @property
    def total_s(self) -> float:
        """Sum of all terms."""
        return sum(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeTime:
    """Forward and backward times of every segment, in forward order."""

    segments: tuple[ModelSegment, ...]
    forward: tuple[SegmentTime, ...]
    backward: tuple[SegmentTime, ...]

    @property
    def forward_s(self) -> float:
        """Seconds of the forward pass."""
        return sum(time.total_s for time in self.forward)

    @property
    def backward_s(self) -> float:
        """Seconds of the backward pass."""
        return sum(time.total_s for time in self.backward)

    def terms(self) -> dict[str, float]:
        """Returns the sum of each `SegmentTime` field over all segments and both directions."""
        by_term = zip(*self.forward, *self.backward, strict=True)
        return dict(zip(SegmentTime._fields, map(sum, by_term), strict=True))

    def completed_after(self) -> list[int]:
        """Returns, per parameter, the number of backward segments that complete its gradient."""
        completed: list[int] = []
        for number, segment in enumerate(reversed(self.segments), start=1):
            completed += [number] * len(segment.parameter_sizes)
        return completed[::-1]


def compute_time(shape: ModelShape, batch: BatchShape, calibration: Calibration) -> ComputeTime:
    """Returns the time of one forward and backward pass."""
    segments = model_segments(shape)
    times = [_segment_times(segment, shape, batch, calibration) for segment in segments]
    forward, backward = zip(*times, strict=True)
    return ComputeTime(segments=segments, forward=forward, backward=backward)


def _segment_times(
    segment: ModelSegment, shape: ModelShape, batch: BatchShape, calibration: Calibration
) -> tuple[SegmentTime, SegmentTime]:
    tokens = batch.tokens_per_pass
    matmul_s = [0.0, 0.0]
    for linear in segment.linears:
        dimensions: tuple[int, ...] = (tokens, linear.inputs, linear.outputs)
        times = nearest_times(calibration.linears, dimensions, linear_work)
        matmul_s = [total + time for total, time in zip(matmul_s, times, strict=True)]
    attention_s = (0.0, 0.0)
    if segment.has_attention:
        dimensions = (
            batch.num_sequences,
            batch.context_length,
            shape.num_heads,
            shape.key_value_heads,
            shape.head_width,
        )
        attention_s = nearest_times(calibration.attentions, dimensions, attention_work)
    elements = [tokens * number for number in segment.elements]
    elements[1] += segment.backward_fixed_elements
    one_launch_s = (calibration.forward_launch_s, calibration.backward_launch_s)
    directions = []
    for direction in (0, 1):
        device_s = (
            matmul_s[direction],
            attention_s[direction],
            elements[direction] * calibration.elementwise_s_per_element,
        )
        launch_s = segment.launches[direction] * one_launch_s[direction]
        if calibration.topology["device"] != "cpu":
            # A GPU runs asynchronously and hides launches while it has queued work.
            launch_s = max(0.0, launch_s - sum(device_s))
        directions.append(SegmentTime(*device_s, launch_s))
    return directions[0], directions[1]
