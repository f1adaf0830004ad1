"""Runs of several sites: they learn, end with one model, read data once, and resume bitwise."""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoint.catalog import list_checkpoints
from paceline.core.errors import UsageError
from paceline.health.checksum import StateTensor
from paceline.health.config import HealthConfig
from paceline.health.monitor import HealthMonitor
from paceline.parallel import RankError, RankPool
from paceline.training.config import OuterConfig, ParallelConfig, RunConfig
from paceline.training.metrics import EXCHANGED, EvaluationRow, EventRow, MetricsFile
from paceline.training.run_directory import audit_run
from tests import devices
from tests.distributed.faulty_runs import Poison, train_faulty
from tests.distributed.outer_programs import groups
from tests.distributed.small_runs import changed, losses_of, small_run, train_rank

Pools = Callable[[int], RankPool]
STEPS = 13


def _sites(config: RunConfig, out: str, strategy: str = "fsdp", **outer: Any) -> RunConfig:
    chosen: dict[str, Any] = {"sites": 2, "every_steps": 4, "fragments": 2, "delay_steps": 1}
    return changed(
        config,
        out,
        parallel={"strategy": strategy, "outer": OuterConfig(**{**chosen, **outer})},
        training={"steps": STEPS, "batch_size": 8},
        checkpoint={"every_steps": 1, "keep_last": 20},
        evaluation={"sequences": 8, "every_steps": 6},
        watch={"hash_every_steps": 1},
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return small_run(tmp_path_factory.mktemp("sites"))


def _saved(config: RunConfig, site: int, step: int = STEPS) -> dict[str, Tensor]:
    """Returns the tensors of a site's checkpoint by name."""
    run = pathlib.Path(config.out, *(("sites", str(site)) if site else ()))
    files = list((run / "checkpoints" / f"step-{step:08}").glob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _model(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in saved.items() if name.startswith("model.")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "ddp", "zero1", "torch_ddp", "torch_fsdp2"])
def test_sites_learn_and_resume_to_the_bit(
    config: RunConfig, rank_pool: Pools, strategy: str
) -> None:
    whole = _sites(config, f"whole-{strategy}", strategy)
    rank_pool(4).run(train_rank, whole)
    losses = losses_of(whole)
    assert len(losses) == STEPS
    rows = list(MetricsFile(pathlib.Path(whole.out) / "metrics.jsonl").read())
    held_out = [row.loss for row in rows if isinstance(row, EvaluationRow)]
    assert len(held_out) == 3
    assert held_out[-1] < held_out[0]
    # All sites have read the stream together, once.
    assert audit_run(pathlib.Path(whole.out)) == (STEPS, [])
    events = [row for row in rows if isinstance(row, EventRow) and row.name == EXCHANGED]
    assert [(row.step, row.details["fragment"]) for row in events if row.details] == [
        *((3, 0), (5, 1), (7, 0), (9, 1), (11, 0), (13, 1))
    ]
    # They end with one model, and have had two before.
    first, second = _model(_saved(whole, 0)), _model(_saved(whole, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    before = _model(_saved(whole, 0, 6)), _model(_saved(whole, 1, 6))
    assert any(not torch.equal(before[0][name], before[1][name]) for name in before[0])
    for step in (3, 4):  # One fragment has been applied; the other is in flight.
        again = _sites(config, f"again-{strategy}-{step}", strategy)
        shutil.copytree(whole.out, again.out)
        for site in ("", "sites/1"):
            for checkpoint in (pathlib.Path(again.out) / site / "checkpoints").iterdir():
                if int(checkpoint.name.removeprefix("step-")) > step:
                    shutil.rmtree(checkpoint)  # As if killed before.
        rank_pool(4).run(train_rank, again)
        assert losses_of(again) == losses
        for site in (0, 1):
            expected, found = _saved(whole, site), _saved(again, site)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_sites_go_back_to_a_step_that_all_have(config: RunConfig, rank_pool: Pools) -> None:
    whole = _sites(config, "apart", "ddp")
    rank_pool(2).run(train_rank, whole)
    losses = losses_of(whole)
    checkpoints = pathlib.Path(whole.out) / "sites" / "1" / "checkpoints"
    for step in range(9, 14):
        shutil.rmtree(checkpoints / f"step-{step:08}")
    (damaged, *_) = (checkpoints / "step-00000008").glob("*.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    rank_pool(2).run(train_rank, whole)
    assert losses_of(whole) == losses
    started = [
        row.message
        for row in MetricsFile(pathlib.Path(whole.out) / "metrics.jsonl").read()
        if isinstance(row, EventRow) and row.name == "started"
    ]
    assert started[-1].startswith("from step 7,")
    steps = [found.step for found in list_checkpoints(str(pathlib.Path(whole.out) / "checkpoints"))]
    assert sorted(steps) == [*range(1, 14)]


@pytest.mark.parametrize(("answer", "window"), [("skip", (6,)), ("rollback", (5, 6))])
def test_sites_skip_and_go_back_together(
    config: RunConfig, rank_pool: Pools, answer: str, window: tuple[int, ...]
) -> None:
    # What is sent after step 4 is in flight when step 6 fails.
    without = _sites(config, f"without-{answer}", "ddp", fragments=1, delay_steps=3)
    without = changed(
        without,
        f"without-{answer}",
        training={"steps": 9, "micro_batch_size": 4},  # One pass in a step.
        evaluation={"sequences": 0},
    )
    rank_pool(2).run(train_faulty, without, (), (), window)
    faulty = changed(
        without, f"faulty-{answer}", watch={"on_nonfinite": answer}, checkpoint={"every_steps": 4}
    )
    poison = Poison(rank=1, passes=(6,))
    outcomes = rank_pool(2).run(train_faulty, faulty, (), (poison,), ())
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert losses_of(faulty) == losses_of(without)
    for site in (0, 1):
        expected, found = _saved(without, site, 9), _saved(faulty, site, 9)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_site_goes_on_alone(config: RunConfig, rank_pool: Pools) -> None:
    shared = _sites(config, "then-alone", "ddp")
    rank_pool(2).run(train_rank, shared)
    alone = dataclasses.replace(
        shared,
        parallel=ParallelConfig(),
        training=dataclasses.replace(shared.training, steps=STEPS + 2),
    )
    rank_pool(1).run(train_rank, alone)
    assert len(losses_of(alone)) == STEPS + 2


def test_other_sites_than_saved_are_refused(config: RunConfig, rank_pool: Pools) -> None:
    shared = _sites(config, "other-sites", "ddp")
    rank_pool(4).run(train_rank, shared)
    longer = changed(shared, "other-sites", training={"steps": STEPS + 4})
    with pytest.raises(RankError, match="is not of a site with 1 ranks among 2 sites"):
        rank_pool(2).run(train_rank, longer)
    slower = _sites(shared, "other-sites", "ddp", every_steps=8)
    with pytest.raises(RankError, match="an outer loop with every steps 4, and this one has 8"):
        rank_pool(4).run(train_rank, changed(slower, "other-sites", training={"steps": STEPS + 4}))


def test_uneven_batches_and_ranks_are_refused(config: RunConfig, rank_pool: Pools) -> None:
    uneven = changed(_sites(config, "uneven"), "uneven", training={"batch_size": 6})
    with pytest.raises(RankError, match="batch_size 6 is not divisible by 4 ranks"):
        rank_pool(4).run(train_rank, uneven)
    with pytest.raises(UsageError, match="sites 2 need equally many ranks each, and there are 3"):
        uneven.parallel.site_ranks(3)


def _found_damage(rank: int, world_size: int, harmed: int | None) -> str | None:
    """Returns what a rank of two sites hears of a flipped bit."""
    _, inside = groups(2, 2)
    values = torch.full((50,), float(rank // 2), device=devices.device_of(rank))
    if rank == harmed:
        values.view(torch.int32)[7] ^= 1
    tensor = StateTensor(name="weight", values=values, is_replicated=True)
    monitor = HealthMonitor(
        HealthConfig(stragglers=False),
        lambda: [tensor],
        devices.device_of(rank),
        world_size,
        mock.MagicMock(),
        inside,
    )
    return monitor.find_damage(1, at_once=True)


def test_damage_inside_a_site_is_known_to_all_and_other_sites_may_differ(rank_pool: Pools) -> None:
    assert rank_pool(4).run(_found_damage, None) == [None] * 4
    for found in rank_pool(4).run(_found_damage, 3):
        assert found is not None
        assert found.startswith("ranks 2 and 3 differ, first in weight")
