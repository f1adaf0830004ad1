"""Tests of framework memory, counted by hand."""

import dataclasses

import numpy as np
import pytest

from paceline.core import ModelShape, ParallelLayout, Precision
from paceline.core.hardware import find_device
from paceline.core.units import GIB
from paceline.predict.cost.activations import block_bytes_per_token, odd_matmul_bytes
from paceline.predict.cost.framework_memory import (
    PLAIN,
    FrameworkMemory,
    find_framework_memory,
    usable_bytes,
)
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory import layout_memory, layout_state_bytes, stage_parameters

LLAMA = ModelShape(
    vocab_size=128_256,
    d_model=4096,
    d_ff=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    max_context_length=8192,
)
TITAN = find_framework_memory("torchtitan", "bfloat16")


def workload(framework: FrameworkMemory = PLAIN, **options: object) -> Workload:
    fields = {
        "shape": LLAMA,
        "precision": Precision(compute="bfloat16", reduction="float32"),
        "context_length": 8192,
        "micro_batch": 2,
        "num_micro_batches": 1,
        "framework_memory": framework,
    }
    return Workload(**(fields | options))  # type: ignore[arg-type]


def layout(**axes: object) -> Layouts:
    return Layouts.of([ParallelLayout(**axes)])  # type: ignore[arg-type]


def test_odd_matmuls_are_query_value_gate_and_down() -> None:
    # 16-bit outputs of query, attention, value, gate and down; one float32 softmax sum per head.
    assert odd_matmul_bytes(workload(TITAN)) == 2 * (4096 + 4096 + 1024 + 14_336 + 4096) + 4 * 32
    selective = layout(activation_checkpointing="selective")
    kept = block_bytes_per_token(selective, workload(TITAN))
    assert kept == odd_matmul_bytes(workload(TITAN)) + 2 * 4096
    everything = block_bytes_per_token(layout(), workload(TITAN))
    assert everything == block_bytes_per_token(selective, workload()) > 3 * kept


def test_fused_kernels_and_float8_keep_less() -> None:
    by_hand = {
        PLAIN: 20 * 4096 + 8 + 4 * 1024 + 8 * 14_336 + 4 * 32,
        FrameworkMemory(fused=True): 12 * 4096 + 8 + 4 * 1024 + 6 * 14_336 + 4 * 32,
        FrameworkMemory(fused=True, float8_inputs=True): (
            11 * 4096 + 8 + 4 * 1024 + 5 * 14_336 + 4 * 32
        ),
    }
    for framework, expected in by_hand.items():
        kept = block_bytes_per_token(layout(), workload(framework))
        assert kept == expected


def test_the_fullest_stage_has_the_embedding() -> None:
    shape = dataclasses.replace(LLAMA, num_layers=30, tied_embeddings=True)
    count = workload(shape=shape)
    embedding = 128_256 * 4096
    (total,) = np.atleast_1d(stage_parameters(layout(), count))
    block = (total - embedding) / 30
    # 30 blocks in 4 stages: 8 each, counting embedding and output layer as one block each.
    assert stage_parameters(layout(pipeline=4), count) == pytest.approx(7 * block + embedding)
    # 30 blocks in 5 stages: six each, plus the embedding in the first.
    assert stage_parameters(layout(pipeline=5), count) == pytest.approx(6 * block + embedding)
    # 7 stages divide neither 30 nor 32: at most five blocks, plus the embedding.
    assert stage_parameters(layout(pipeline=7), count) == pytest.approx(5 * block + embedding)


def test_what_deepspeed_and_fsdp_hold_beside_their_states() -> None:
    sharded = layout(shard=4, sharding="optimizer")
    plain = layout_state_bytes(sharded, workload())
    beside = layout_state_bytes(
        sharded, workload(FrameworkMemory(step_bytes=4, low_gradient_bytes=2))
    )
    total = stage_parameters(layout(), workload())
    assert beside.optimizer_state - plain.optimizer_state == pytest.approx(4 * total / 4)
    assert beside.gradients - plain.gradients == pytest.approx(2 * total)
    stages = layout(shard=4, sharding="parameters", pipeline=2)
    gathered = layout_state_bytes(stages, workload(FrameworkMemory(stays_gathered=True))).gathered
    assert gathered == pytest.approx(2 * stage_parameters(stages, workload()))


def test_constant_and_gaps_add_to_the_peak() -> None:
    few, many = (
        layout_memory(layout(), workload(framework))
        for framework in (PLAIN, FrameworkMemory(constant_bytes=1e9, gaps=0.5, most_with_gaps=2e9))
    )
    assert many.total - few.total == pytest.approx(2e9)
    split = layout(tensor=2, sequence_parallel=True)
    whole = layout_memory(split, workload(FrameworkMemory(whole_sequences=8))).framework
    assert whole == pytest.approx(8 * 2 * 4096 * 16_384)
    assert layout_memory(layout(), workload(FrameworkMemory(whole_sequences=8))).framework == 0


def test_a_device_of_80_gb_has_80_gib_but_for_a_little() -> None:
    assert usable_bytes(find_device("a100-sxm-80gb")) == pytest.approx(79.2 * GIB)
