import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting import count_parameters, model_state_bytes, step_memory
from paceline.accounting.memory.model_states import parameter_sizes
from paceline.accounting.memory.step import MemoryParts
from paceline.core import BatchShape, ModelShape, Precision, model_preset
from paceline.core.strategies import (
    SHARDED_GRADIENTS,
    SHARDED_PARAMETERS,
    SHARDED_STATE,
    StrategyName,
)
from paceline.models import TransformerLM

XL = model_preset("xl")
PARAMETERS = 1_998_235_200
BATCH = BatchShape(num_sequences=4, context_length=128)


@pytest.mark.parametrize(
    ("strategy", "bytes_per_parameter"),
    [("torch_ddp", 16), ("zero1", 12), ("zero2", 10), ("fsdp", 8)],
)
def test_states_of_the_courses_xl_on_two_ranks(
    strategy: StrategyName, bytes_per_parameter: int
) -> None:
    states = model_state_bytes(XL, Precision(), strategy, 2)
    total = states.parameters + states.gradients + states.optimizer_state
    # Counters and flags: at most 12 bytes per tensor.
    num_tensors = len(parameter_sizes(XL))
    assert 0 <= total - bytes_per_parameter * PARAMETERS <= 12 * num_tensors


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_of_the_model(tied: bool) -> None:
    shape = ModelShape(
        vocab_size=50,
        d_model=16,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=6,
        tied_embeddings=tied,
    )
    with torch.device("meta"):
        model = TransformerLM(shape)
    assert sorted(parameter_sizes(shape)) == sorted(p.numel() for p in model.parameters())
    assert sum(parameter_sizes(shape)) == count_parameters(shape).total


@given(st.sampled_from(SHARDED_STATE), st.integers(2, 64))
def test_shares_add_up_to_the_whole(strategy: StrategyName, world_size: int) -> None:
    whole = model_state_bytes(XL, Precision(), "torch_ddp", world_size)
    states = model_state_bytes(XL, Precision(), strategy, world_size)
    tensors = 4 * len(parameter_sizes(XL))
    assert states.optimizer_state * world_size >= whole.optimizer_state - tensors
    for names, whole_bytes, own_bytes in (
        (SHARDED_GRADIENTS, whole.gradients, states.gradients),
        (SHARDED_PARAMETERS, whole.parameters, states.parameters),
    ):
        if strategy in SHARDED_PARAMETERS:
            # Padding is less than a row per matrix and rank; the longest row has 6400 numbers.
            assert 0 <= own_bytes * world_size - whole_bytes < 6400 * tensors * world_size
        elif strategy in names:
            # Padding of a shard is less than 16 bytes and one element per unit.
            assert 0 <= own_bytes * world_size - whole_bytes <= 20 * world_size * tensors
        else:
            assert 0 <= own_bytes - whole_bytes <= 20 * world_size * tensors


def test_whole_parameters_are_dealt_to_the_rank_that_has_least() -> None:
    shape = ModelShape(vocab_size=10, d_model=4, d_ff=8, num_layers=1, num_heads=1)
    # Sizes 40, 40, 32, 32, 32, four of 16 and three of 4: the three ranks get 40 + 32 + 16,
    # 40 + 16 + 16 + 4 + 4 + 4 and 32 + 32 + 16.
    states = model_state_bytes(shape, Precision(), "torch_zero", 3)
    assert sum(parameter_sizes(shape)) == 252
    assert states.optimizer_state == 8 * 88 + 4 * 3


def test_buckets_are_there_before_there_are_gradients() -> None:
    memory = step_memory(XL, BATCH, Precision(), "torch_ddp", 2)
    first, before = memory["after_init"], memory["before_step"]
    assert (first.gradients, first.optimizer_state, first.activations) == (0, 0, 0)
    assert first.buffers == before.buffers + before.gradients
    alone = step_memory(XL, BATCH, Precision(), "none", 2)["after_init"]
    assert alone.buffers == before.buffers


def test_without_buckets_gradients_come_as_activations_go() -> None:
    with_buckets = step_memory(XL, BATCH, Precision(), "torch_ddp", 2)["before_step"]
    without = step_memory(XL, BATCH, Precision(), "none", 2)["before_step"]
    assert without.total < with_buckets.total


def test_the_parts_add_up() -> None:
    parts = MemoryParts(
        parameters=1, gradients=20, optimizer_state=300, buffers=4000, activations=50000
    )
    assert parts.total == 54321
