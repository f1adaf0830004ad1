"""How long a model's forward and backward take on a calibrated machine, piece by piece."""

import dataclasses

from paceline.accounting.step_work import Piece, step_pieces
from paceline.core.specs import BatchShape, ModelShape
from paceline.prediction.calibration import (
    Calibration,
    attention_work,
    linear_work,
    nearest_times,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PieceTime:
    """Seconds of one direction of one piece, by what they go to."""

    products_s: float
    attention_s: float
    stream_s: float
    """Elementwise operations."""
    calls_s: float
    """What operators cost whatever their size."""

    @property
    def total_s(self) -> float:
        """All together."""
        return self.products_s + self.attention_s + self.stream_s + self.calls_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeTime:
    """Both directions of every piece, in the order of the forward pass."""

    pieces: tuple[Piece, ...]
    forward: tuple[PieceTime, ...]
    backward: tuple[PieceTime, ...]

    @property
    def forward_s(self) -> float:
        """Seconds of the forward pass."""
        return sum(time.total_s for time in self.forward)

    @property
    def backward_s(self) -> float:
        """Seconds of the backward pass."""
        return sum(time.total_s for time in self.backward)

    def total(self, term: str) -> float:
        """Returns the seconds of one field of `PieceTime` over all pieces and directions."""
        return sum(float(getattr(time, term)) for time in (*self.forward, *self.backward))

    def completed_after(self) -> list[int]:
        """Returns after how many pieces of backward each parameter's gradient is complete."""
        completed: list[int] = []
        for number, piece in enumerate(reversed(self.pieces), start=1):
            completed += [number] * len(piece.parameter_sizes)
        return completed[::-1]


def compute_time(shape: ModelShape, batch: BatchShape, calibration: Calibration) -> ComputeTime:
    """Returns the time of one forward and backward pass."""
    pieces = step_pieces(shape)
    times = [_piece_times(piece, shape, batch, calibration) for piece in pieces]
    return ComputeTime(
        pieces=pieces,
        forward=tuple(forward for forward, _ in times),
        backward=tuple(backward for _, backward in times),
    )


def _piece_times(
    piece: Piece, shape: ModelShape, batch: BatchShape, calibration: Calibration
) -> tuple[PieceTime, PieceTime]:
    tokens = batch.tokens_per_pass
    products = [0.0, 0.0]
    for linear in piece.linears:
        dimensions: tuple[int, ...] = (tokens, linear.inputs, linear.outputs)
        times = nearest_times(calibration.linears, dimensions, linear_work(dimensions))
        products = [total + time for total, time in zip(products, times, strict=True)]
    attention = (0.0, 0.0)
    if piece.has_attention:
        dimensions = (
            batch.num_sequences,
            batch.context_length,
            shape.num_heads,
            shape.key_value_heads,
            shape.head_width,
        )
        attention = nearest_times(calibration.attentions, dimensions, attention_work(dimensions))
    backward_elements = tokens * piece.backward_elements + piece.backward_fixed_elements
    calls = (
        piece.forward_calls * calibration.forward_call_s,
        piece.backward_calls * calibration.backward_call_s,
    )
    elements = (tokens * piece.forward_elements, backward_elements)
    forward, backward = (
        _direction(
            products[direction],
            attention[direction],
            elements[direction] * calibration.stream_element_s,
            calls[direction],
            runs_behind=calibration.place["device"] != "cpu",
        )
        for direction in (0, 1)
    )
    return forward, backward


def _direction(
    products_s: float, attention_s: float, stream_s: float, calls_s: float, *, runs_behind: bool
) -> PieceTime:
    if runs_behind:
        # A device that runs behind the program hides calls, as far as it has something to do.
        calls_s = max(0.0, calls_s - products_s - attention_s - stream_s)
    return PieceTime(
        products_s=products_s, attention_s=attention_s, stream_s=stream_s, calls_s=calls_s
    )
