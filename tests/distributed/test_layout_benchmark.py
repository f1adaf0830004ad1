"""Measurements and traces of layouts on ranks, from which records are built."""

import pathlib
from collections.abc import Callable

import pytest

from paceline.benchmarks.calibration import measure_engine
from paceline.benchmarks.compute_probes import BLOCK_TIME, engine_layouts
from paceline.benchmarks.config import LayoutCase, LayoutSweep
from paceline.benchmarks.harness.ranks import collect, prepare, run_round, trace_rounds
from paceline.benchmarks.layouts import LayoutComparison, LayoutResult
from paceline.benchmarks.options import ShapeOverrides
from paceline.parallel import RankPool
from paceline.traces.analysis import analyse_trace
from paceline.traces.pipeline import PipelineStep, pipeline_steps
from tests import devices

Pools = Callable[[int], RankPool]


def _case(*layouts: str, batch_size: int = 8) -> LayoutCase:
    shape = ShapeOverrides(num_layers=4, d_model=64, d_ff=128, num_heads=4, num_kv_heads=2)
    sweep = LayoutSweep(
        layouts=layouts,
        model=("bytes-6M",),
        batch_size=batch_size,
        context=32,
        shape=shape,
        warmup=1,
        rounds=2,
    )
    (case,) = sweep.cases()
    return case


def _measure(_rank: int, _world_size: int, case: LayoutCase) -> list[LayoutResult]:
    device = devices.own_device()
    prepare(device, LayoutComparison, case)
    run_round(device, False)
    for _ in range(case.sweep.rounds):
        assert run_round(device, True) > 0
    return collect(device)


def test_layouts_take_turns_and_ranks_agree_on_the_slowest_and_the_fullest(
    rank_pool: Pools,
) -> None:
    case = _case("replicate=2,micro=2", "pipeline=2,micro=1")
    first, second = rank_pool(2).run(_measure, case)
    assert first == second
    for result in first:
        assert [len(values) for values in result.samples.values()] == [case.sweep.rounds]
    replicas, stages = (result.peak_bytes for result in first)
    assert stages < replicas  # Each rank has half of the model, and the batch in parts.


def _trace(_rank: int, _world_size: int, case: LayoutCase, path: pathlib.Path) -> None:
    device = devices.own_device()
    prepare(device, LayoutComparison, case)
    run_round(device, False)
    trace_rounds(device, path, case.sweep.rounds)


def _traced(pool: RankPool, path: pathlib.Path, layout: str) -> list[PipelineStep]:
    case = _case(layout)
    pool.run(_trace, case, path)
    steps = pipeline_steps(analyse_trace(path).steps, range(pool.world_size))
    assert [step.label for step in steps] == [case.sweep.specs[0].text] * case.sweep.rounds
    return list(steps)


@pytest.mark.parametrize(
    ("layout", "bubble"),
    [
        pytest.param("pipeline=2,micro=1", 1 / 8, marks=pytest.mark.slow),
        ("pipeline=2,interleave=2,micro=1", 1 / 16),
    ],
)
def test_a_trace_has_the_order_of_the_schedule(
    rank_pool: Pools, tmp_path: pathlib.Path, layout: str, bubble: float
) -> None:
    for step in _traced(rank_pool(2), tmp_path / "trace.json", layout):
        # The schedule determines the order; waiting times depend on the machine.
        assert step.order_bubble == pytest.approx(bubble, rel=0.01)
        assert step.idle == pytest.approx(step.bubble + step.imbalance)
        assert step.messages > -0.01
        numbers = [piece.what.micro_batch for piece in step.work if piece.what.phase == "forward"]
        assert set(numbers) == set(range(8))


def _time_engine(_rank: int, _world_size: int) -> dict[str, dict[str, list[float]]]:
    return measure_engine(devices.own_device(), ranks_per_host=2, time_limit_s=0.0)


@pytest.mark.slow
def test_what_the_engine_takes_is_timed_by_all_ranks(rank_pool: Pools) -> None:
    first, second = rank_pool(2).run(_time_engine)
    assert first == second
    assert first.keys() == {"plain", "shard", "tensor", "sequence", "pipeline"}
    for laps in first.values():
        samples = laps[BLOCK_TIME]
        assert len(samples) == 5
        assert min(samples) > 0


@pytest.mark.parametrize(
    ("world_size", "ranks_per_host", "tensor"), [(4, 2, 2), (2, 1, 2), (3, 3, 1), (32, 16, 8)]
)
def test_tensor_ranks_share_a_host_where_it_has_several(
    world_size: int, ranks_per_host: int, tensor: int
) -> None:
    layouts = engine_layouts(world_size, ranks_per_host)
    assert all(layout.world_size == world_size for layout in layouts.values())
    split = [layouts[name].tensor for name in ("tensor", "sequence") if name in layouts]
    assert split == [tensor] * 2 * (tensor > 1)
    assert ("pipeline" in layouts) == (world_size % 2 == 0)
