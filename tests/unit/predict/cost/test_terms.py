"""Tests of terms that a calibration turns on: each by hand, and off by default."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from paceline.accounting.counts import inactive_parameters
from paceline.core import ModelShape, ParallelLayout, Precision, UsageError
from paceline.core.specs import Experts
from paceline.predict.cost.cluster import Cluster, MeasuredCorrections, Tier, Tiers, cell_of
from paceline.predict.cost.communication import (
    CommGroups,
    all_to_all_time_s,
    data_slowdown,
    gradient_time_s,
)
from paceline.predict.cost.layouts import Layouts, Workload, join_shapes
from paceline.predict.cost.memory_traffic import loss_bytes, num_kernels
from paceline.predict.cost.step_time import flops_per_pass, small_matmul_flops, step_time

SHAPE = ModelShape(vocab_size=1000, d_model=256, d_ff=1024, num_layers=4, num_heads=4)
TIERS = Tiers(
    (
        Tier(name="host", num_devices=8, latency_s=0.0, bytes_per_s=1e11),
        Tier(name="network", num_devices=None, latency_s=0.0, bytes_per_s=1e10),
    )
)
CLUSTER = Cluster(flops_per_s=1e14, memory_bytes_per_s=1e12, tiers=TIERS)
WORKLOAD = Workload(
    shape=SHAPE,
    precision=Precision(compute="bfloat16"),
    context_length=512,
    micro_batch=2,
    num_micro_batches=3,
)
ONE = Layouts.of([ParallelLayout()])
SHARDED = Layouts.of([ParallelLayout(shard=16, sharding="parameters")])


def _terms(layouts: Layouts = ONE, workload: Workload = WORKLOAD, **changes: Any) -> Any:
    return step_time(layouts, workload, dataclasses.replace(CLUSTER, **changes))


def test_attention_has_a_rate_of_its_own() -> None:
    flops = flops_per_pass(ONE, WORKLOAD).layer_attention[0] * 3 * 4
    slower = _terms(attention_flops_per_s=5e13).compute_s - _terms().compute_s
    assert slower[0] == pytest.approx(flops / 1e14)


def test_a_layer_is_never_faster_than_its_launches() -> None:
    kernels = float(np.asarray(num_kernels(ONE, WORKLOAD)).reshape(-1)[0])
    slow = _terms(dispatch_s=1e-3)
    # Launches far exceed the work here, so they alone set the time of the layers.
    layers = slow.compute_s + slow.memory_s + slow.launch_s
    assert layers[0] == pytest.approx(kernels * 1e-3 * 3 * 4, rel=0.02)
    assert _terms(dispatch_s=1e-12).launch_s[0] == 0


def test_small_matmuls_lose_what_the_formula_says() -> None:
    cluster = dataclasses.replace(CLUSTER, matmul_tokens=100.0, matmul_width=50.0)
    tokens = 1024
    matrices = [(768, 256), (256, 256), (1024, 256), (1024, 256), (256, 1024)]
    lost = sum(2 * tokens * n * k * (100 / tokens + 50 / n + 50 / k) * 3 for n, k in matrices)
    assert small_matmul_flops(ONE, WORKLOAD, cluster)[0] == pytest.approx(lost)


def test_a_width_of_no_whole_tiles_takes_longer() -> None:
    odd = dataclasses.replace(WORKLOAD, shape=dataclasses.replace(SHAPE, d_ff=1000))
    cluster = dataclasses.replace(CLUSTER, misaligned=0.5)
    matmuls = 3 * 2 * 1024 * 256 * 1000 * 3
    assert small_matmul_flops(ONE, WORKLOAD, cluster) == pytest.approx(0)
    assert small_matmul_flops(ONE, odd, cluster)[0] == pytest.approx(0.5 * matmuls)


def test_a_share_of_the_traffic_is_never_hidden() -> None:
    fast = {"flops_per_s": 1e9}
    assert _terms(SHARDED, **fast).data_s[0] == 0
    exposed = _terms(SHARDED, exposed_share=0.25, **fast).data_s[0]
    all_of_it = _terms(SHARDED, exposed_share=1.0, **fast).data_s[0]
    assert exposed == pytest.approx(0.25 * all_of_it)
    assert all_of_it > 0


def test_contention_grows_with_each_doubling_of_hosts() -> None:
    cluster = dataclasses.replace(CLUSTER, contention=0.1)
    layouts = Layouts.of([ParallelLayout(replicate=replicas) for replicas in (8, 16, 64)])
    assert data_slowdown(layouts, cluster) == pytest.approx([1.0, 1.1, 1.3])


def test_every_step_takes_what_is_fixed() -> None:
    assert _terms(step_s=0.5).total_s[0] - _terms().total_s[0] == pytest.approx(0.5)


def test_states_sharded_over_context_are_reduced_over_both() -> None:
    layouts = Layouts.of([ParallelLayout(shard=4, context=2, sharding="optimizer")])
    both = dataclasses.replace(layouts, shards_context=True)
    assert both.state_shards[0] == 8
    size = 4 * 1e6
    seconds = gradient_time_s(both, WORKLOAD, CommGroups.of(both, TIERS), 1e6)
    assert seconds[0] == pytest.approx(7 / 8 * size / 1e11)
    assert _terms(both).optimizer_s[0] == pytest.approx(_terms(layouts).optimizer_s[0] / 2)


def test_cells_scale_the_layers_of_their_sizes() -> None:
    cell = int(cell_of(1024, 256, 1))
    cells = MeasuredCorrections(entries=((cell, float(np.log(1.5))),))
    plain, scaled = _terms(), _terms(cells=cells)
    head = 6 * 1000 * 256 * 1024 / 1e14
    layers = plain.compute_s[0] / 3 - head + plain.memory_s[0] / 3
    layers -= loss_bytes(ONE, WORKLOAD)[0] * 1024 / 1e12
    assert scaled.measured_s[0] == pytest.approx(0.5 * 3 * layers)
    other = dataclasses.replace(WORKLOAD, micro_batch=8)
    assert _terms(workload=other, cells=cells).measured_s[0] == 0


def test_cells_are_drawn_towards_one() -> None:
    made = MeasuredCorrections.of(np.array([7, 7, 9]), np.array([0.4, 0.4, 0.3]))
    assert dict(made.entries) == {7: 0.2, 9: 0.1}


def test_a_fused_loss_touches_logits_three_times() -> None:
    fused = dataclasses.replace(WORKLOAD, fused_loss=True)
    assert loss_bytes(ONE, fused)[0] == 3 * 2 * 1000


def test_selective_recomputation_may_repeat_matmuls() -> None:
    selective = Layouts.of([ParallelLayout(activation_checkpointing="selective")])
    half = dataclasses.replace(WORKLOAD, repeated_matmuls=0.5)
    plain = flops_per_pass(selective, WORKLOAD).layer_matrices
    assert flops_per_pass(selective, half).layer_matrices == pytest.approx(plain * 3.5 / 3)
    assert flops_per_pass(ONE, half).layer_matrices == pytest.approx(plain)


def test_experts_send_tokens_inside_and_outside_of_the_host() -> None:
    experts = Experts(num_experts=64, experts_per_token=4, width=128)
    layouts = dataclasses.replace(Layouts.of([ParallelLayout(replicate=16)]), expert=np.array([16]))
    workload = dataclasses.replace(WORKLOAD, experts=experts)
    sent = 2 * 1024 * 256 * 4
    one_way = sent * (7 / 1e11 + 8 / 1e10) / 16
    seconds = all_to_all_time_s(layouts, workload, experts, TIERS)
    assert seconds[0] == pytest.approx(4 * one_way)
    assert inactive_parameters(experts, SHAPE) == 3 * 256 * 128 * 60 * 4
    assert _terms(layouts, workload).total_s[0] > _terms(layouts).total_s[0]
    with pytest.raises(UsageError, match="5 of 4"):
        Experts(num_experts=4, experts_per_token=5, width=1)


def test_shapes_that_are_joined_are_predicted_like_each_alone() -> None:
    other = dataclasses.replace(SHAPE, d_model=512, num_layers=6, num_kv_heads=2)
    layouts = Layouts.of([ParallelLayout(shard=2, sharding="parameters", tensor=2)] * 2)
    joined = dataclasses.replace(WORKLOAD, shape=join_shapes([SHAPE, other]))
    alone = [
        step_time(
            Layouts.of([ParallelLayout(shard=2, sharding="parameters", tensor=2)]),
            dataclasses.replace(WORKLOAD, shape=shape),
            CLUSTER,
        ).total_s[0]
        for shape in (SHAPE, other)
    ]
    assert step_time(layouts, joined, CLUSTER).total_s == pytest.approx(alone)
    with pytest.raises(UsageError, match="same kind of blocks"):
        join_shapes([SHAPE, dataclasses.replace(SHAPE, biases=True)])


def test_a_constant_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="dispatch_s is -1"):
        dataclasses.replace(CLUSTER, dispatch_s=-1.0)
