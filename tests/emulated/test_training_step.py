"""A training step waits for the device once, to read its loss, and only after the last launch.

A step lasts until the next one begins, so the way of a batch to the device counts as well.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.core.strategies import StrategyName
from paceline.parallel import RankPool
from paceline.training import loop
from paceline.training.config import RunConfig
from paceline.training.step import TrainingStep
from tests import devices
from tests.distributed.device_pool import DevicePool
from tests.distributed.small_runs import changed, small_run, train_rank

Pools = Callable[[int], RankPool]
_STRATEGIES: tuple[StrategyName, ...] = ("ddp", "zero1", "zero2", "fsdp", "torch_fsdp2")
_STEPS = 5
Waits = list[tuple[str, str]]


def _train(rank: int, world_size: int, config: RunConfig) -> list[tuple[Waits, bool]]:
    """Returns the host's waits of each step, and whether the first came after the all-reduce."""
    device_module = devices.emulated()
    found: list[tuple[Waits, bool]] = []
    reduced_before: list[bool] = []
    all_reduce = dist.all_reduce

    def noticed(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if tensor.dtype == torch.float64:  # The loss, and what is sent with it.
            reduced_before.append(not device_module.synchronizations())
        return all_reduce(tensor, *arguments, **keywords)

    class Counted(TrainingStep):
        def run(self, *arguments: Any, **keywords: Any) -> Any:
            found.append((device_module.synchronizations(), all(reduced_before)))
            device_module.C.clear_synchronizations()
            reduced_before.clear()
            return super().run(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "TrainingStep", Counted)
        patch.setattr(dist, "all_reduce", noticed)
        train_rank(rank, world_size, config)
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    run = small_run(tmp_path_factory.mktemp("step"))
    steps, saves = {"steps": _STEPS, "clip_norm": 0.5}, {"every_steps": 100}
    return changed(run, "run", training=steps, checkpoint=saves)


@pytest.fixture(scope="module")
def ranks() -> Any:
    with DevicePool(2, timeout_s=120) as pool:
        yield pool


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_a_step_waits_once_and_after_its_all_reduce(
    config: RunConfig, ranks: RankPool, strategy: StrategyName
) -> None:
    out = f"{pathlib.Path(config.out).name}-{strategy}"
    own = changed(config, out, parallel={"strategy": strategy})
    for steps in ranks.run(_train, own):
        assert len(steps) == _STEPS
        for waits, reduced_first in steps[2:]:  # The first is what came before all steps.
            assert [kind for kind, _ in waits] == ["copy to the host"], waits
            assert reduced_first
