"""Runs on a mesh: non-finite gradients, failing stages, bf16, compiled blocks, evaluation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.models import TransformerLM
from paceline.parallel import RankError, RankPool
from paceline.training.config import RunConfig
from paceline.training.evaluation import HeldOut
from paceline.training.forecast import layout_of
from paceline.training.parallelize import build
from paceline.training.step import TrainingStep
from tests import devices
from tests.distributed.device_pool import DevicePool
from tests.distributed.faulty_runs import Poison, train_faulty
from tests.distributed.small_runs import changed, losses_of, small_run, train_rank
from tests.distributed.test_pipeline import batch, pipeline_of, shape_of

Pools = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return changed(
        small_run(tmp_path_factory.mktemp("failures")),
        "run",
        training={"steps": 7},
        checkpoint={"keep_last": 9},
    )


def test_a_gradient_that_is_not_finite_on_one_tensor_rank_is_skipped_by_all(
    config: RunConfig, rank_pool: Pools
) -> None:
    # One pass per step: one run leaves out the third batch, the other has its pass poisoned.
    one_pass = {"steps": 7, "micro_batch_size": 4}
    layout: dict[str, Any] = {"parallel": {"tensor": 2}, "training": one_pass}
    without = changed(config, "without", **layout)
    skipping = changed(config, "skipping", **layout, watch={"on_nonfinite": "skip"})
    pool = rank_pool(2)
    assert len(set(pool.run(train_faulty, without, (), (), (3,)))) == 1
    said = pool.run(train_faulty, skipping, (), (Poison(rank=1, passes=(3,)),))
    assert {outcome.step for outcome in said} == {7}
    assert losses_of(skipping) == losses_of(without)


def test_bfloat16_in_a_pipeline_is_that_of_one_process(config: RunConfig, rank_pool: Pools) -> None:
    lower = {"steps": 7, "precision": "bfloat16"}
    alone = changed(config, "alone-bf16", training=lower)
    stages = changed(config, "stages-bf16", training=lower, parallel={"pipeline": 2})
    exact = changed(config, "stages-float32", parallel={"pipeline": 2})
    rank_pool(1).run(train_rank, alone)
    for run in (stages, exact):
        rank_pool(2).run(train_rank, run)
    np.testing.assert_allclose(losses_of(stages), losses_of(alone), rtol=1e-5)
    assert losses_of(stages) != losses_of(exact)


def _fail_on_the_last_stage(rank: int, _world_size: int) -> None:
    pipeline, _ = pipeline_of(TransformerLM(shape_of()).to(devices.own_device()))

    def fail(*_: object) -> None:
        raise ArithmeticError("this stage is broken")

    if rank == 1:
        pipeline.stages[1].register_forward_hook(fail)
    pipeline.forward_and_backward(*batch(0))


def test_an_exception_on_one_stage_ends_the_run_with_its_reason(rank_pool: Pools) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed: .*this stage is broken"):
        rank_pool(2).run(_fail_on_the_last_stage)


def _error_of(rank: int, world_size: int) -> str:
    try:
        _fail_on_the_last_stage(rank, world_size)
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.host("NCCL ends a rank whose messages do not come")
@pytest.mark.slow
def test_the_other_stages_end_with_an_error_of_their_own() -> None:
    with DevicePool(2, timeout_s=20, run_timeout_s=120) as pool:
        first, last = pool.run(_error_of)
    assert "this stage is broken" in last
    assert "Timed out" in first


@pytest.mark.host("compilers need kernels")
@pytest.mark.slow
def test_compiled_blocks_in_a_pipeline(config: RunConfig, rank_pool: Pools) -> None:
    plain = changed(config, "plain", parallel={"pipeline": 2})
    compiled = changed(config, "compiled", parallel={"pipeline": 2}, model={"compile_blocks": True})
    for run in (plain, compiled):
        rank_pool(2).run(train_rank, run)
    np.testing.assert_allclose(losses_of(compiled), losses_of(plain), rtol=1e-5)


def _evaluate(rank: int, world_size: int, config: RunConfig) -> list[str]:
    """Evaluates and returns the names of the parameters that are not sharded afterwards."""
    session = devices.session_of(rank, world_size)
    train_state = build(config, layout_of(config, session.world_size), session)
    held_out = HeldOut(config, train_state, session.device)
    step = TrainingStep(config.training, train_state, session.device)
    held_out.evaluate(train_state, step.autocast)

    def is_whole(parameter: Tensor) -> bool:
        return not (isinstance(parameter, DTensor) and parameter.placements[0].is_shard())

    return [name for name, each in train_state.module.named_parameters() if is_whole(each)]


@pytest.mark.slow
def test_after_evaluation_nothing_stays_gathered(config: RunConfig, rank_pool: Pools) -> None:
    run = changed(
        config,
        "evaluated",
        parallel={"pipeline": 2, "strategy": "fsdp"},
        training={"steps": 7, "batch_size": 8},
        evaluation={"sequences": 8},
    )
    assert rank_pool(4).run(_evaluate, run) == [[], [], [], []]
