"""Configuration of calibration. Free of torch, because the command line imports it."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from paceline.benchmarks.harness.config import ModelName, RankSweep, ShapeOverrides
from paceline.core.collectives import Operation
from paceline.core.errors import UsageError
from paceline.core.specs import BatchShape, ModelShape, require_buildable, require_context

CALIBRATED_OPERATIONS: tuple[Operation, ...] = (
    "all_reduce",
    "reduce_to_owners",
    "gather_from_owners",
)
"""Collectives used by the strategies that can be predicted."""


class LinearShape(NamedTuple):
    """A linear layer applied to a batch."""

    tokens: int
    inputs: int
    outputs: int


class AttentionShape(NamedTuple):
    """Causal attention of a batch."""

    batch: int
    context: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class ComputeShapes(NamedTuple):
    """Shapes to time, each once."""

    linears: tuple[LinearShape, ...]
    attentions: tuple[AttentionShape, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationSweep(RankSweep):
    """Measure the speed of this machine on the parts of a training step."""

    model: tuple[ModelName, ...] = ("bytes-34M",)
    """Model presets whose matmuls and attention are timed."""
    batch: tuple[int, ...] = (4,)
    """Sequences per rank and step."""
    context: int = 128
    """Context length, in tokens."""
    time_limit_s: float = 45.0
    """Seconds for all measurements, about half for computing and half for communication. Starting
    ranks, and slow links, take extra time."""
    timeout_s: float = 120.0
    """Seconds after which a collective without progress is an error."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model or not self.batch:
            raise UsageError("calibrate needs at least one --model and one --batch")

    def batches(self) -> Iterator[tuple[ModelShape, BatchShape]]:
        """Yields every model with every batch."""
        for name, num_sequences in itertools.product(self.model, self.batch):
            _, shape = self.shape.apply(name)
            require_buildable(shape)
            require_context(name, shape, self.context)
            yield shape, BatchShape(num_sequences=num_sequences, context_length=self.context)

    def compute_shapes(self) -> ComputeShapes:
        """Returns the shapes to time, each once."""
        # Imported here, because parsing flags must not load NumPy.
        from paceline.accounting.step_work import model_segments

        batches = list(self.batches())
        linears = [
            LinearShape(batch.tokens_per_pass, linear.inputs, linear.outputs)
            for shape, batch in batches
            for segment in model_segments(shape)
            for linear in segment.linears
        ]
        attentions = [
            AttentionShape(
                batch=batch.num_sequences,
                context=batch.context_length,
                num_heads=shape.num_heads,
                num_kv_heads=shape.key_value_heads,
                head_dim=shape.head_width,
            )
            for shape, batch in batches
        ]
        return ComputeShapes(tuple(dict.fromkeys(linears)), tuple(dict.fromkeys(attentions)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeCalibration(CalibrationSweep):
    """A calibration for models without a preset."""

    models: tuple[tuple[ModelShape, BatchShape], ...]
    """Model shapes, each with the batch of one rank."""

    def batches(self) -> Iterator[tuple[ModelShape, BatchShape]]:
        """Yields every model with its batch."""
        yield from self.models
