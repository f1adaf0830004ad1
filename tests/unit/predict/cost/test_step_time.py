"""Tests of the closed form of a step: by hand on one device, and properties on any mesh."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.accounting import count_parameters, flops_per_token
from paceline.core import ModelShape, ParallelLayout, Precision, UsageError
from paceline.predict.cost.cluster import Tier, Tiers
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory_traffic import elementwise_bytes, loss_bytes, num_kernels
from paceline.predict.cost.step_time import (
    Cluster,
    StepTime,
    flops_per_pass,
    pipeline_bubble,
    step_time,
)

TIERS = (
    Tier(name="host", num_devices=8, latency_s=5e-6, bytes_per_s=2.4e11),
    Tier(name="pod", num_devices=64, latency_s=1e-5, bytes_per_s=2.5e10),
    Tier(name="all", num_devices=None, latency_s=2e-5, bytes_per_s=1e10),
)
CLUSTER = Cluster(flops_per_s=1.5e14, memory_bytes_per_s=2e12, tiers=Tiers(TIERS))
WORKLOAD = Workload(
    shape=ModelShape(vocab_size=32_000, d_model=4096, d_ff=11_008, num_layers=48, num_heads=32),
    precision=Precision(parameters="bfloat16", compute="bfloat16", master_weights=True),
    context_length=2048,
    micro_batch=2,
    num_micro_batches=8,
)
NAIVE = dataclasses.replace(WORKLOAD, attention="naive")


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    shard = draw(st.sampled_from([1, 2, 8, 64]))
    sharding = draw(st.sampled_from(["optimizer", "gradients", "parameters"]))
    return ParallelLayout(
        replicate=draw(st.sampled_from([1, 2, 16])),
        shard=shard,
        sharding=sharding if shard > 1 else "none",
        tensor=draw(st.sampled_from([1, 2, 8, 16])),
        context=draw(st.sampled_from([1, 2, 4])),
        pipeline=draw(st.sampled_from([1, 2, 5, 8])),
        pipeline_interleave=draw(st.sampled_from([1, 3])),
        sequence_parallel=draw(st.booleans()),
        activation_checkpointing=draw(st.sampled_from(["none", "selective", "full"])),
    )


workloads = st.builds(
    lambda attention, reduces_every_pass, passes: dataclasses.replace(
        WORKLOAD,
        attention=attention,
        reduces_every_pass=reduces_every_pass,
        num_micro_batches=passes,
    ),
    st.sampled_from(["naive", "flash"]),
    st.booleans(),
    st.sampled_from([1, 8]),
)


def _terms(
    layout: ParallelLayout, workload: Workload = WORKLOAD, cluster: Cluster = CLUSTER, **more: Any
) -> StepTime:
    return step_time(Layouts.of([layout]), workload, cluster, **more)


def _total(*arguments: Any, **more: Any) -> float:
    return float(_terms(*arguments, **more).total_s[0])


@settings(max_examples=80)
@given(layouts(), workloads, st.integers(0, 2), st.floats(1, 50), st.sampled_from([0.0, 0.5, 1.0]))
def test_faster_links_never_slow_a_step(
    layout: ParallelLayout, workload: Workload, which: int, factor: float, hidden: float
) -> None:
    tiers = list(TIERS)
    tiers[which] = dataclasses.replace(
        tiers[which],
        bytes_per_s=factor * tiers[which].bytes_per_s,
        latency_s=tiers[which].latency_s / factor,
    )
    faster = dataclasses.replace(CLUSTER, tiers=Tiers(tuple(tiers)))
    slow = _total(layout, workload, hidden=hidden)
    assert _total(layout, workload, faster, hidden=hidden) <= slow * (1 + 1e-12)


@settings(max_examples=40)
@given(layouts(), workloads)
def test_hiding_more_never_slows_a_step_and_no_term_is_negative(
    layout: ParallelLayout, workload: Workload
) -> None:
    times = [_total(layout, workload, hidden=hidden) for hidden in (0.0, 0.3, 1.0)]
    assert times == sorted(times, reverse=True)
    terms = _terms(layout, workload)
    for field in dataclasses.fields(terms):
        assert np.all(getattr(terms, field.name) >= -1e-12), field.name


@settings(max_examples=40)
@given(layouts())
def test_operations_are_divided_not_lost(layout: ParallelLayout) -> None:
    done = flops_per_pass(Layouts.of([layout]), NAIVE)
    # The blocks are spread over the stages; one of them has the output layer.
    devices = layout.tensor * layout.context
    everywhere = devices * (48 * (done.layer_matrices + done.layer_attention) + done.head)
    expected = flops_per_token(
        NAIVE.shape, 2048, activation_checkpointing=layout.activation_checkpointing
    ).hardware
    assert everywhere == pytest.approx(expected * 2 * 2048)
    terms = _terms(layout, NAIVE, dataclasses.replace(CLUSTER, memory_bytes_per_s=1e30))
    on_the_mesh = terms.compute_s * 1.5e14 * devices * layout.pipeline
    assert on_the_mesh == pytest.approx(expected * 2 * 2048 * 8)


def test_one_device_only_computes_moves_and_updates() -> None:
    layout = ParallelLayout()
    terms = _terms(layout, NAIVE)
    for name in ("tensor_s", "context_s", "stages_s", "imbalance_s", "bubble_s", "data_s"):
        assert getattr(terms, name) == pytest.approx(0, abs=1e-12), name
    tokens = 8 * 2 * 2048
    model = flops_per_token(NAIVE.shape, 2048).model
    # Heads of 128 channels do 128 FLOPs per byte of scores, more than this device's 75: they are
    # compute-bound.
    assert terms.compute_s == pytest.approx([model * tokens / 1.5e14])
    moved = elementwise_bytes(Layouts.of([layout]), NAIVE) * 48
    moved = moved + loss_bytes(Layouts.of([layout]), NAIVE)
    assert terms.memory_s == pytest.approx(moved * tokens / 2e12)
    # Moments and the float32 copy are read and written, gradients read, parameters written.
    updated = count_parameters(NAIVE.shape).total * (2 * 12 + 4 + 2)
    assert terms.optimizer_s == pytest.approx([updated / 2e12])


def test_stored_scores_may_take_longer_to_move_than_to_compute() -> None:
    slow_memory = dataclasses.replace(CLUSTER, memory_bytes_per_s=2e11)
    computed, moved = (_terms(ParallelLayout(), NAIVE, on) for on in (CLUSTER, slow_memory))
    assert moved.compute_s[0] > computed.compute_s[0]
    flash = [_terms(ParallelLayout(), WORKLOAD, on).compute_s[0] for on in (CLUSTER, slow_memory)]
    assert flash[0] == flash[1]


def test_flash_attention_computes_half_of_the_scores_and_some_again() -> None:
    plain, causal = (flops_per_pass(Layouts.of([ParallelLayout()]), of) for of in (NAIVE, WORKLOAD))
    ratio = causal.layer_attention / plain.layer_attention
    assert ratio == pytest.approx([2049 / 2 / 2048 * 3.5 / 3])


def test_tensor_ranks_all_reduce_four_times_a_layer_and_two_more_to_recompute() -> None:
    # A ring all-reduce over two ranks sends the full size once, in two hops.
    once = 2 * 5e-6 + 2 * 2 * 2048 * 4096 / 2.4e11
    layout = ParallelLayout(tensor=2)
    assert _terms(layout).tensor_s == pytest.approx([8 * 48 * 4 * once])
    again = dataclasses.replace(layout, activation_checkpointing="full")
    assert _terms(again).tensor_s == pytest.approx([8 * 48 * 6 * once])
    in_halves = dataclasses.replace(layout, sequence_parallel=True)
    assert _terms(in_halves).tensor_s == pytest.approx([8 * 48 * 4 * once])


def test_context_ranks_gather_keys_and_values() -> None:
    # Two all-gathers of keys and values and a reduce-scatter of their gradients; each receives half
    # from the other rank.
    once = 5e-6 + 2 * 2 * 4096 * 2 * 2048 / 2 / 2.4e11
    assert _terms(ParallelLayout(context=2)).context_s == pytest.approx([8 * 48 * 3 * once])


def test_stages_hand_on_their_stream_to_a_neighbour() -> None:
    # Sixteen replicas of one device lie between neighbouring stages, so they use the pod's links.
    layout = ParallelLayout(pipeline=2, replicate=16)
    one_way = 1e-5 + 2 * 2 * 2048 * 4096 / 2.5e10
    assert _terms(layout).stages_s == pytest.approx([8 * 2 * one_way])
    interleaved = dataclasses.replace(layout, pipeline_interleave=3)
    assert _terms(interleaved).stages_s == pytest.approx([8 * 2 * 3 * one_way])
    assert (
        interleaved.pipeline_interleave * _terms(interleaved).bubble_s
        < 1.2 * _terms(layout).bubble_s
    )


def test_the_slowest_stage_sets_the_pace() -> None:
    even = _terms(ParallelLayout(pipeline=2))
    head = flops_per_pass(Layouts.of([ParallelLayout()]), WORKLOAD).head / 1.5e14
    head = head + loss_bytes(Layouts.of([ParallelLayout()]), WORKLOAD) * 2 * 2048 / 2e12
    assert even.imbalance_s == pytest.approx(8 * head / 2)
    # 48 layers over five stages: four stages of ten and one of eight.
    assert _terms(ParallelLayout(pipeline=5)).imbalance_s > 0


def test_averaging_gradients_after_every_pass_sends_as_often() -> None:
    layout = ParallelLayout(replicate=4)
    once = _terms(layout, hidden=0.0).data_s
    # In a ring all-reduce over four ranks, each sends three quarters of the bytes twice.
    num_bytes = 4 * count_parameters(WORKLOAD.shape).total
    assert once == pytest.approx([6 * 5e-6 + 1.5 * num_bytes / 2.4e11])
    every = dataclasses.replace(WORKLOAD, reduces_every_pass=True)
    assert _terms(layout, every, hidden=0.0).data_s == pytest.approx(8 * once)


@pytest.mark.parametrize(
    ("sharding", "gathers", "reductions"),
    [("optimizer", 1, 1), ("gradients", 1, 1), ("parameters", 16, 1)],
)
def test_sharded_states_are_gathered_and_reduced(
    sharding: Any, gathers: int, reductions: int
) -> None:
    layout = ParallelLayout(shard=4, sharding=sharding)
    num_parameters = count_parameters(WORKLOAD.shape).total
    gathered = 3 * 5e-6 + 0.75 * 2 * num_parameters / 2.4e11
    reduced = 3 * 5e-6 + 0.75 * 4 * num_parameters / 2.4e11
    sent = _terms(layout, hidden=0.0).data_s
    assert sent == pytest.approx([gathers * gathered + reductions * reduced])


def test_backward_hides_averaging_up_to_its_own_length() -> None:
    slow = dataclasses.replace(TIERS[-1], bytes_per_s=1e9)
    cluster = dataclasses.replace(CLUSTER, tiers=Tiers((slow,)))
    single = dataclasses.replace(WORKLOAD, num_micro_batches=1)
    for pipeline, checkpointing, backward in ((1, "none", 2 / 3), (5, "full", 3 / 4)):
        layout = ParallelLayout(
            replicate=128, pipeline=pipeline, activation_checkpointing=checkpointing
        )
        sent = _terms(layout, single, cluster, hidden=0.0)
        busy = sent.compute_s + sent.memory_s + sent.imbalance_s
        for hidden in (0.5, 1.0):
            exposed = _terms(layout, single, cluster, hidden=hidden).data_s
            assert exposed > 0
            assert exposed == pytest.approx(sent.data_s - hidden * backward * busy)


def test_hybrid_sharding_keeps_most_bytes_inside_the_host() -> None:
    inside = ParallelLayout(replicate=8, shard=8, sharding="parameters")
    everywhere = ParallelLayout(shard=64, sharding="parameters")
    sent = _terms(inside, hidden=0.0).data_s
    assert sent < _terms(everywhere, hidden=0.0).data_s
    # Inside the host: 16 all-gathers of the parameters and one reduce-scatter of the gradients.
    # Between hosts: an all-reduce of an eighth of the gradients.
    num_parameters = count_parameters(WORKLOAD.shape).total
    gathered = 7 * 5e-6 + 7 / 8 * 2 * num_parameters / 2.4e11
    reduced = 7 * 5e-6 + 7 / 8 * 4 * num_parameters / 2.4e11
    averaged = 14 * 1e-5 + 7 / 4 * 4 * num_parameters / 8 / 2.5e10
    assert sent == pytest.approx([16 * gathered + reduced + averaged])


def test_launches_cost_what_they_are_given() -> None:
    given_cost = dataclasses.replace(CLUSTER, launch_s=1e-5)
    kernels = num_kernels(Layouts.of([ParallelLayout()]), WORKLOAD)
    extra = _total(ParallelLayout(), WORKLOAD, given_cost) - _total(ParallelLayout())
    assert extra == pytest.approx(float(kernels[0]) * 8 * 48 * 1e-5)


def test_layouts_may_differ_in_their_batches() -> None:
    layout = ParallelLayout(tensor=2, pipeline=2)
    both = dataclasses.replace(
        WORKLOAD, micro_batch=np.array([1, 2]), num_micro_batches=np.array([16, 8])
    )
    together = step_time(Layouts.of([layout, layout]), both, CLUSTER).total_s
    apart = [
        _total(layout, dataclasses.replace(WORKLOAD, micro_batch=size, num_micro_batches=passes))
        for size, passes in ((1, 16), (2, 8))
    ]
    assert together == pytest.approx(apart)


def test_the_bubble_of_a_pipeline() -> None:
    assert pipeline_bubble(8, 64) == pytest.approx(7 / 64)
    assert pipeline_bubble(8, 64, 3) == pytest.approx(7 / 192)
    assert pipeline_bubble(1, 1) == 0


def test_impossible_figures_are_refused() -> None:
    with pytest.raises(UsageError, match="hidden"):
        _terms(ParallelLayout(), hidden=1.5)
    with pytest.raises(UsageError, match="flops_per_s"):
        dataclasses.replace(CLUSTER, flops_per_s=0.0)
    with pytest.raises(UsageError, match="micro_batch"):
        dataclasses.replace(WORKLOAD, micro_batch=np.array([1, 0]))
