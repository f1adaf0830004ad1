"""Tests of elementwise memory traffic: by hand, divided over ranks, and recomputed."""

import dataclasses
from typing import Any

import pytest

from paceline.core import ModelShape, ParallelLayout, Precision, UsageError
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory_traffic import (
    elementwise_bytes,
    elementwise_operations,
    loss_bytes,
    num_kernels,
    score_product_bytes,
)

WIDTH, HEADS, LENGTH = 128, 4, 64
HALF = Precision(parameters="float16", compute="float16")
CLASSIC = Workload(
    shape=ModelShape(
        vocab_size=1000,
        d_model=WIDTH,
        d_ff=4 * WIDTH,
        num_layers=2,
        num_heads=HEADS,
        feed_forward="gelu",
        norm="layernorm",
        positions="learned",
        biases=True,
    ),
    precision=HALF,
    context_length=LENGTH,
    micro_batch=1,
    num_micro_batches=1,
    attention="naive",
    dropout=True,
)
GATED = dataclasses.replace(
    CLASSIC,
    shape=ModelShape(
        vocab_size=1000, d_model=WIDTH, d_ff=512, num_layers=2, num_heads=HEADS, num_kv_heads=2
    ),
    attention="flash",
    dropout=False,
)
SCORES = HEADS * LENGTH


def _moved(workload: Workload, **options: Any) -> float:
    return float(elementwise_bytes(Layouts.of([ParallelLayout(**options)]), workload)[0])


def test_a_classic_block_by_hand() -> None:
    # Bytes per channel in forward: two norms read and write (8), two residuals with dropout masks
    # (14). In backward: norms 12, residuals 12, dropout 10, biases 4.
    stream = WIDTH * ((8 + 14) + (12 + 12 + 10 + 4))
    # Forward and backward: biases of queries, keys and values 12 and 6, heads 4 and 16, activation
    # function 16 and 32.
    matrices = WIDTH * ((12 + 4 + 16) + (6 + 16 + 32))
    # Bytes per score in forward and backward: softmax 4 and 6, dropout 5 and 5.
    scores = SCORES * ((4 + 5) + (6 + 5))
    assert _moved(CLASSIC) == stream + matrices + scores


def test_a_gated_block_by_hand() -> None:
    stream = WIDTH * ((8 + 12) + (12 + 12))
    # Rotary positions of queries and half as many keys: 6 and 6. Heads: 4 in forward; in backward
    # 4, plus 8 for queries, keys and values.
    attention = WIDTH * ((6 + 4) + (6 + 4 + 8))
    activation = 512 * 2 * (5 + 8)
    assert _moved(GATED) == stream + attention + activation


def test_what_tensor_ranks_divide() -> None:
    stream = sum(
        operation.forward_bytes + operation.backward_bytes
        for operation in elementwise_operations(CLASSIC)
        if operation.division == "stream"
    )
    whole = _moved(CLASSIC)
    assert _moved(CLASSIC, tensor=4) == stream + (whole - stream) / 4
    assert _moved(CLASSIC, tensor=4, sequence_parallel=True) == whole / 4


def test_what_is_recomputed_moves_again() -> None:
    whole = _moved(CLASSIC)
    forward = sum(operation.forward_bytes for operation in elementwise_operations(CLASSIC))
    assert _moved(CLASSIC, activation_checkpointing="full") == whole + forward
    assert _moved(CLASSIC, activation_checkpointing="selective") == whole + 9 * SCORES
    assert _moved(GATED, activation_checkpointing="selective") == _moved(GATED)


@pytest.mark.parametrize(("checkpointing", "times"), [("none", 6), ("selective", 8), ("full", 8)])
def test_products_of_scores_move_them(checkpointing: Any, times: int) -> None:
    layouts = Layouts.of([ParallelLayout(tensor=2, activation_checkpointing=checkpointing)])
    assert score_product_bytes(layouts, CLASSIC) == [times * 2 * SCORES / 2]
    assert score_product_bytes(layouts, GATED) == [0]


def test_the_loss_moves_its_vocabulary() -> None:
    layouts = Layouts.of([ParallelLayout(tensor=4)])
    assert loss_bytes(layouts, CLASSIC) == [(10 * 4 + 2 * (2 + 4)) * 1000 / 4]


def test_kernels_are_counted() -> None:
    # Six matmuls, two norms and two residuals; one kernel each for biases, heads, activation,
    # softmax and dropout.
    forward = 6 + 2 + 2 + 5
    layouts = Layouts.of([ParallelLayout(), ParallelLayout(activation_checkpointing="full")])
    assert list(num_kernels(layouts, CLASSIC)) == [2 * forward + 6, 3 * forward + 6]


def test_a_block_without_attention_has_one_branch() -> None:
    linear = dataclasses.replace(
        GATED,
        shape=ModelShape(
            vocab_size=0,
            d_model=WIDTH,
            d_ff=512,
            num_layers=1,
            num_heads=0,
            feed_forward="linear",
            norm="none",
        ),
    )
    assert [operation.name for operation in elementwise_operations(linear)] == ["residuals"]
    assert _moved(linear) == WIDTH * (6 + 6)


def test_dropout_in_flash_attention_is_refused() -> None:
    with pytest.raises(UsageError, match="dropout"):
        _moved(dataclasses.replace(GATED, dropout=True))
