"""Tests of layout memory: the figures of Korthikanti et al. 2022, and general properties."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.accounting import count_parameters, model_state_bytes
from paceline.core import ModelShape, ParallelLayout, Precision, precision_preset
from paceline.core.units import GIB
from paceline.predict.cost.activations import kept_activations
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory import (
    StateBytes,
    layout_memory,
    layout_state_bytes,
    stage_parameters,
)
from tests.unit.predict.cost.megatron_cases import megatron_shape

# Name: width, heads, layers, pipeline, interleave, micro-batch, and figure 1 in GiB per GPU:
# parameters and optimizer, activations, activations with sequence parallelism and selective
# recomputation.
MODELS = {
    "22B": (6144, 64, 48, 1, 1, 4, 45.56, 59.25, 9.56),
    "175B": (12288, 96, 96, 8, 3, 1, 45.56, 66.84, 12.35),
    "530B": (20480, 128, 105, 35, 3, 1, 31.64, 114.02, 23.08),
    "1T": (25600, 160, 128, 64, 1, 1, 32.96, 131.25, 26.56),
}
# Figure 7: activations with sequence parallelism, selective recomputation, both, and full
# recomputation, in percent of those without any.
PERCENT = {
    "22B": (66.84, 49.42, 16.18, 7.64),
    "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42),
    "1T": (58.31, 62.04, 20.27, 9.42),
}
MIXED = Precision(parameters="float16", compute="float16", gradients="float32", master_weights=True)
SHAPE = ModelShape(vocab_size=1000, d_model=64, d_ff=160, num_layers=12, num_heads=4)
WORKLOAD = Workload(
    shape=SHAPE,
    precision=precision_preset("float32"),
    context_length=32,
    micro_batch=2,
    num_micro_batches=4,
)


def _published(name: str, **options: Any) -> tuple[Layouts, Workload]:
    width, heads, layers, pipeline, interleave, micro_batch, *_ = MODELS[name]
    layout = ParallelLayout(tensor=8, pipeline=pipeline, pipeline_interleave=interleave, **options)
    shape = megatron_shape(width, heads, layers)
    workload = Workload(
        shape=shape,
        precision=MIXED,
        context_length=2048,
        micro_batch=micro_batch,
        num_micro_batches=512,
        attention="naive",
        dropout=True,
    )
    return Layouts.of([layout]), workload


def _activations(name: str, **options: Any) -> float:
    return float(kept_activations(*_published(name, **options))[0])


def _states(layout: ParallelLayout, precision: Precision = MIXED, **options: Any) -> StateBytes:
    workload = dataclasses.replace(WORKLOAD, precision=precision, **options)
    return layout_state_bytes(Layouts.of([layout]), workload)


@pytest.mark.parametrize("name", MODELS)
def test_published_memory_per_device(name: str) -> None:
    *_, states, plain, spared = MODELS[name]
    assert _activations(name) / GIB == pytest.approx(plain, rel=0.05)
    both = _activations(name, sequence_parallel=True, activation_checkpointing="selective")
    assert both / GIB == pytest.approx(spared, rel=0.05)
    held = layout_state_bytes(*_published(name))
    # The figure spreads the embedding over all stages; here the largest stage holds all of it.
    assert states < held.total[0] / GIB < 1.09 * states


@pytest.mark.parametrize("name", PERCENT)
def test_published_shares(name: str) -> None:
    plain = _activations(name)
    spared = (
        _activations(name, sequence_parallel=True),
        _activations(name, activation_checkpointing="selective"),
        _activations(name, sequence_parallel=True, activation_checkpointing="selective"),
        _activations(name, activation_checkpointing="full"),
    )
    assert [100 * held / plain for held in spared] == pytest.approx(PERCENT[name], rel=0.05)


@settings(max_examples=60)
@given(
    st.integers(1, 256),
    st.integers(0, 3),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 12]),
    st.sampled_from([1, 4]),
    st.booleans(),
    st.sampled_from([MIXED, precision_preset("float32"), precision_preset("bfloat16")]),
)
def test_more_shards_never_need_more(
    shard: int,
    stage: int,
    tensor: int,
    pipeline: int,
    num_micro_batches: int,
    reduces_every_pass: bool,
    precision: Precision,
) -> None:
    sharding = ("none", "optimizer", "gradients", "parameters")[stage]

    def total(ranks: int) -> float:
        layout = ParallelLayout(
            replicate=2,
            shard=ranks if stage else 1,
            sharding=sharding,
            tensor=tensor,
            pipeline=pipeline,
        )
        workload = dataclasses.replace(
            WORKLOAD,
            precision=precision,
            num_micro_batches=num_micro_batches,
            reduces_every_pass=reduces_every_pass,
        )
        return float(layout_memory(Layouts.of([layout]), workload).total[0])

    assert total(2 * shard) <= total(shard) * (1 + 1e-12)


def test_each_stage_divides_what_it_says() -> None:
    num_parameters = count_parameters(SHAPE).total
    once = {"num_micro_batches": 1}
    for stage, sharding in enumerate(("optimizer", "gradients", "parameters"), start=1):
        held = _states(ParallelLayout(shard=4, sharding=sharding), **once)
        assert held.optimizer_state == pytest.approx([12 * num_parameters / 4])
        assert held.gradients == pytest.approx([4 * num_parameters / (4 if stage >= 2 else 1)])
        assert held.parameters == pytest.approx([2 * num_parameters / (4 if stage >= 3 else 1)])
        assert (held.gathered[0] > 0) == (stage == 3)


def test_replicas_of_shards_divide_nothing() -> None:
    alone = _states(ParallelLayout(shard=4, sharding="parameters"))
    hybrid = _states(ParallelLayout(replicate=8, shard=4, sharding="parameters"))
    assert hybrid.total == alone.total


def test_accumulated_gradients_are_whole_unless_every_pass_averages_them() -> None:
    layout = ParallelLayout(shard=4, sharding="gradients")
    whole = 4 * count_parameters(SHAPE).total
    assert _states(layout).gradients == pytest.approx([whole])
    assert _states(layout, reduces_every_pass=True).gradients == pytest.approx([whole / 4])
    assert _states(layout, num_micro_batches=1).gradients == pytest.approx([whole / 4])


def test_copies_of_gradients_and_weights() -> None:
    counted = count_parameters(SHAPE)
    replicas = ParallelLayout(replicate=2)
    assert _states(replicas).buckets == 0
    autocast = _states(replicas, precision_preset("bfloat16"))
    assert autocast.weight_copies == pytest.approx([2 * counted.matmul])
    assert autocast.parameters + autocast.gradients + autocast.optimizer_state == pytest.approx(
        [16 * counted.total]
    )
    assert _states(replicas).weight_copies == 0
    # With sharded parameters, gathered copies already have the compute dtype: two blocks and the
    # embedding, which is larger than a block here. They never exceed the device's part of the
    # model.
    away = _states(ParallelLayout(shard=2, sharding="parameters"), precision_preset("bfloat16"))
    block = (counted.attention + counted.feed_forward) / 12
    assert away.weight_copies == 0
    assert away.gathered == pytest.approx([2 * (2 * block + counted.embedding)])
    deep = ParallelLayout(shard=2, sharding="parameters", pipeline=12)
    fullest = stage_parameters(Layouts.of([deep]), WORKLOAD)
    assert _states(deep).gathered == pytest.approx(2 * fullest)


def test_logits_are_held_by_the_last_stage_and_divided_by_tensor_ranks() -> None:
    plain = layout_memory(Layouts.of([ParallelLayout()]), WORKLOAD)
    assert plain.working == pytest.approx([3 * 4 * 64 * 1000])
    split = layout_memory(Layouts.of([ParallelLayout(tensor=4)]), WORKLOAD)
    assert split.working == pytest.approx(plain.working / 4)
    # The first of twelve stages has four micro-batches in flight, the last has one and the logits.
    last = layout_memory(Layouts.of([ParallelLayout(pipeline=12)]), WORKLOAD)
    block = plain.activations / 12
    assert last.activations == pytest.approx(4 * block)
    assert last.activations + last.working == pytest.approx(max(4 * block, block + plain.working))


def test_full_recomputation_holds_a_block_again() -> None:
    layout = ParallelLayout(activation_checkpointing="full")
    few_words = dataclasses.replace(WORKLOAD, shape=dataclasses.replace(SHAPE, vocab_size=16))
    held = layout_memory(Layouts.of([layout]), few_words)
    whole = layout_memory(Layouts.of([ParallelLayout()]), few_words)
    stream = 12 * 4 * 64 * 64
    assert held.activations == pytest.approx([stream])
    assert held.working == pytest.approx(whole.activations / 12 - stream / 12)


@pytest.mark.parametrize(("interleave", "blocks"), [(1, 12), (3, 12 * (1 + 3 / 12))])
def test_micro_batches_in_flight(interleave: int, blocks: float) -> None:
    one = kept_activations(Layouts.of([ParallelLayout()]), WORKLOAD) / 12
    layout = ParallelLayout(pipeline=4, pipeline_interleave=interleave)
    many = dataclasses.replace(WORKLOAD, num_micro_batches=64)
    assert kept_activations(Layouts.of([layout]), many) == pytest.approx(one * blocks)
    single = dataclasses.replace(WORKLOAD, num_micro_batches=1)
    assert kept_activations(Layouts.of([layout]), single) == pytest.approx(one * 3)


def test_one_device_holds_what_the_formula_for_one_device_says() -> None:
    precision = precision_preset("float32")
    held = _states(ParallelLayout(), precision)
    expected = model_state_bytes(SHAPE, precision, "none", 1)
    assert held.parameters == [expected.parameters]
    assert held.gradients == [expected.gradients]
    # That formula also counts the optimizer's step counters, four bytes per tensor.
    counters = 4 * (3 + 9 * SHAPE.num_layers)
    assert held.optimizer_state == [expected.optimizer_state - counters]
    assert held.total == held.parameters + held.gradients + held.optimizer_state
