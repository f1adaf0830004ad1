import dataclasses

import pytest

from paceline.accounting.counts import count_parameters
from paceline.core import UsageError
from paceline.core.plan import ParallelLayout
from paceline.core.presets import model_preset
from paceline.core.specs import BatchShape, Precision
from paceline.predict.cost.cluster import NO_ENGINE
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.step_time import step_time
from paceline.predict.step import cluster_of_ranks, compute_time
from tests.unit.predict.calibration_cases import make_calibration

_SHAPE = model_preset("bytes-34M")


def _workload(num_micro_batches: int = 1) -> Workload:
    return Workload(
        shape=_SHAPE,
        precision=Precision(),
        context_length=128,
        micro_batch=2,
        num_micro_batches=num_micro_batches,
    )


def test_a_pass_of_one_rank_takes_what_the_calibration_says() -> None:
    calibration, workload = make_calibration(), _workload()
    batch = BatchShape(num_sequences=2, context_length=128)
    seconds = compute_time(_SHAPE, batch, calibration).terms()
    time = step_time(
        Layouts.of([ParallelLayout()]), workload, cluster_of_ranks(calibration, workload)
    )
    assert float(time.compute_s[0]) == pytest.approx(seconds["matmul_s"] + seconds["attention_s"])
    assert float(time.memory_s[0]) == pytest.approx(seconds["elementwise_s"])
    assert float(time.launch_s[0]) == pytest.approx(seconds["launch_s"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_replicas_take_what_the_fitted_all_reduce_takes(ranks: int) -> None:
    calibration, workload = make_calibration(world_size=ranks), _workload()
    cluster = cluster_of_ranks(calibration, workload)
    layouts = Layouts.of([ParallelLayout(replicate=ranks)])
    exposed = step_time(layouts, workload, cluster, hidden=0.0).data_s

    expected = calibration.collective("all_reduce").time_s(4 * count_parameters(_SHAPE).total)
    assert float(exposed[0]) == pytest.approx(expected, rel=1e-3)


def test_one_rank_has_no_links() -> None:
    with pytest.raises(UsageError, match="which has no links"):
        cluster_of_ranks(make_calibration(world_size=1), _workload())


def test_ranks_of_one_host_talk_over_its_own_links() -> None:
    between, inside = make_calibration(world_size=4), make_calibration(bytes_per_s=8e9)
    cluster = cluster_of_ranks(between, _workload(), inside)
    assert [tier.num_devices for tier in cluster.tiers.tiers] == [2, None]
    layouts = Layouts.of([ParallelLayout(tensor=2, replicate=2), ParallelLayout(tensor=4)])
    within, across = step_time(layouts, _workload(), cluster, hidden=0.0).tensor_s.tolist()
    host = cluster_of_ranks(inside, _workload())
    alone = step_time(Layouts.of([ParallelLayout(tensor=2)]), _workload(), host, hidden=0.0)
    assert within == pytest.approx(float(alone.tensor_s[0]))
    assert within < across


def test_what_the_engine_takes_counts_by_block_pass_and_collective() -> None:
    engine = {"plain": 1e-3, "tensor": 5e-3, "sequence": 7e-3, "shard": 4e-3, "pipeline": 1.5e-3}
    calibration = dataclasses.replace(make_calibration(), engine=engine)
    workload = _workload(num_micro_batches=3)
    cluster = cluster_of_ranks(calibration, workload)
    batch = BatchShape(num_sequences=2, context_length=128)
    launches = compute_time(_SHAPE, batch, calibration).terms()["launch_s"] / _SHAPE.num_layers
    layouts = Layouts.of(
        [
            ParallelLayout(),
            ParallelLayout(tensor=2),
            ParallelLayout(tensor=2, sequence_parallel=True),
            ParallelLayout(shard=2, sharding="parameters"),
            ParallelLayout(pipeline=2),
            ParallelLayout(pipeline=2, pipeline_interleave=4),
        ]
    )
    taken = step_time(layouts, workload, cluster, hidden=0.0).engine_s
    alone = 3 * 8 * (1e-3 - launches)
    # FSDP2 gathers each of 9 units twice per pass in 3 passes, and averages its gradients once.
    beyond = [0, 3 * 8 * 4e-3, 3 * 8 * 6e-3, 9 * (2 * 3 + 1) * 1e-3]
    assert taken[:4].tolist() == pytest.approx([alone + each for each in beyond])
    # Each stage of a rank sends its output in each of 3 passes.
    assert taken[4:].tolist() == pytest.approx([alone / 2 + 3 * n * 0.5e-3 for n in (1, 4)])


@pytest.mark.parametrize("engine", [{}, {"plain": 1e-3, "shard": 2e-3}])
def test_a_gpu_hides_what_the_engine_takes(engine: dict[str, float]) -> None:
    calibration = make_calibration()
    topology = {**calibration.topology, "device": "cuda" if engine else "cpu"}
    calibration = dataclasses.replace(calibration, topology=topology, engine=engine)
    assert cluster_of_ranks(calibration, _workload()).engine == NO_ENGINE


def test_stages_that_share_processors_have_the_bubble_of_fewer_stages() -> None:
    workload = _workload(num_micro_batches=8)
    alone = cluster_of_ranks(make_calibration(world_size=4), workload)
    shared = dataclasses.replace(alone, oversubscription=2.0)
    layouts = Layouts.of([ParallelLayout(pipeline=2), ParallelLayout(pipeline=4)])
    two, four = (step_time(layouts, workload, each, hidden=0.0) for each in (alone, shared))
    assert four.bubble_s[0] == 0
    # (4 / 2 - 1) / (2 * 8) instead of (4 - 1) / 8.
    assert four.bubble_s[1] == pytest.approx(two.bubble_s[1] / 6)
    assert two.imbalance_s[1] > 0
    assert four.imbalance_s[1] == 0
