"""Compares predicted states and peaks of every strategy with the tensors of the ranks."""

import gc
from collections.abc import Callable
from typing import Literal, get_args

import pytest

from paceline.accounting import step_memory
from paceline.accounting.memory.model_states import parameter_sizes, rank_state_bytes
from paceline.accounting.memory.step import MemoryParts
from paceline.benchmarks.config import OptimizerCase, StepCase, StepSweep, Variant
from paceline.benchmarks.optimizer_memory import OptimizerMeasurement, named_bytes
from paceline.benchmarks.options import PrecisionName
from paceline.benchmarks.strategies import StrategyStep
from paceline.core.specs import (
    AttentionImplementation,
    BatchShape,
    ModelShape,
    Precision,
    precision_preset,
)
from paceline.core.strategies import BUCKET_STRATEGIES, StrategyName
from paceline.parallel import RankPool
from tests import devices

Pools = Callable[[int], RankPool]

# Odd widths: few tensor sizes are multiples of the alignment or of the number of ranks.
ODD = ModelShape(
    vocab_size=54,
    d_model=7,
    d_ff=11,
    num_layers=3,
    num_heads=3,
    num_kv_heads=1,
    head_dim=6,
    max_context_length=16,
)
BUCKET_SIZES_MB: dict[StrategyName, float] = dict.fromkeys(BUCKET_STRATEGIES, 0.002)
"""Small enough for several buckets, each with padding."""
SMALL = ModelShape(
    vocab_size=500, d_model=64, d_ff=256, num_layers=4, num_heads=4, max_context_length=64
)
BATCH = BatchShape(num_sequences=4, context_length=64)


def _case(
    shape: ModelShape,
    batch: BatchShape,
    precision: PrecisionName = "float32",
    checkpointing: Literal["none", "full"] = "none",
    attention: AttentionImplementation = "sdpa",
) -> StepCase:
    sweep = StepSweep(
        activation_checkpointing=checkpointing,
        attention=attention,
        device=devices.device_of(0).type,
        steps=1,
    )
    return StepCase(sweep, "test", shape, batch, "train", precision, warmup=1)


def _held(_rank: int, _world_size: int, strategy: StrategyName) -> tuple[int, ...]:
    """Returns the bytes of this rank's parameters, gradients and optimizer state in training."""
    case = _case(ODD, BatchShape(num_sequences=2, context_length=5))
    variant = Variant(strategy=strategy, bucket_size_mb=BUCKET_SIZES_MB.get(strategy))
    step = StrategyStep(case, variant, devices.own_device())
    for _ in range(2):
        step.run()
    step.forward_and_backward()
    return tuple(named_bytes(step).values())


@pytest.mark.sampled(9)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", get_args(StrategyName))
def test_states_are_the_bytes_of_the_tensors_of_every_rank(
    rank_pool: Pools, strategy: StrategyName, world_size: int
) -> None:
    assert sum(parameter_sizes(ODD)) % 4
    size = BUCKET_SIZES_MB.get(strategy, 25.0)
    states = rank_state_bytes(ODD, Precision(), strategy, world_size, bucket_size_mb=size)
    predicted = zip(states.parameters, states.gradients, states.optimizer_state, strict=True)
    measured = rank_pool(world_size).run(_held, strategy)
    assert measured == [tuple(map(int, parts)) for parts in predicted]


def _memory(
    _rank: int, _world_size: int, case: StepCase, strategy: StrategyName
) -> dict[str, MemoryParts]:
    size = 25.0 if strategy in BUCKET_STRATEGIES else None
    variant = Variant(strategy=strategy, bucket_size_mb=size)
    gc.collect()  # Garbage of the last strategy must not be freed during this measurement.
    measurement = OptimizerMeasurement(OptimizerCase(case, variant), devices.own_device())
    memory = measurement.result().memory
    del measurement
    gc.collect()
    return memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision", "checkpointing", "attention"),
    [
        pytest.param("ddp", "float32", "none", "sdpa", marks=pytest.mark.slow),
        pytest.param("torch_ddp", "bfloat16", "none", "sdpa", marks=pytest.mark.slow),
        pytest.param("zero2", "float32", "full", "sdpa", marks=pytest.mark.slow),
        ("fsdp", "float32", "none", "sdpa"),
        pytest.param("none", "float32", "none", "naive", marks=pytest.mark.slow),
        pytest.param("zero2", "float32", "none", "sdpa", marks=pytest.mark.slow),
        pytest.param("fsdp", "float32", "full", "sdpa", marks=pytest.mark.slow),
        pytest.param("torch_fsdp2", "float32", "none", "sdpa", marks=pytest.mark.slow),
    ],
)
def test_the_peak_on_two_ranks(
    rank_pool: Pools,
    strategy: StrategyName,
    precision: PrecisionName,
    checkpointing: Literal["none", "full"],
    attention: AttentionImplementation,
) -> None:
    predicted = step_memory(
        SMALL,
        BATCH,
        precision_preset(precision),
        strategy,
        2,
        activation_checkpointing=checkpointing,
        attention=attention,
    )
    case = _case(SMALL, BATCH, precision, checkpointing, attention)
    measured = rank_pool(2).run(_memory, case, strategy)[0]
    for instant, parts in predicted.items():
        assert parts.total == pytest.approx(measured[instant].total, rel=0.05), instant
