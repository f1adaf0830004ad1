"""Runs give the same results on any number of ranks and strategy, and resume bitwise."""

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.checkpoint.catalog import list_checkpoints
from paceline.data.loader.config import SourceConfig
from paceline.data.manifest import MANIFEST, encode_manifest, read_manifest
from paceline.data.storage import open_storage
from paceline.parallel import RankError, RankPool
from paceline.records import RecordStore
from paceline.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    StepConfig,
)
from paceline.training.metrics import EvaluationRow, MetricsFile, MetricsRow, StepRow
from paceline.training.recovery import explain_nonfinite
from tests.distributed.small_runs import train_rank
from tests.unit.data.dataset_factory import random_documents, write_dataset

Pools = Callable[[int], RankPool]
STEPS = 6


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    place = tmp_path_factory.mktemp("training")
    tokens = place / "tokens"
    write_dataset(tokens, random_documents(4000), shard_tokens=1000)
    return RunConfig(
        out=str(place / "run"),
        model=ModelConfig(preset="bytes-6M", num_layers=2, d_model=32, d_ff=64, num_heads=2),
        data=DataConfig(sources=(SourceConfig(place=str(tokens)),), context_length=16),
        training=StepConfig(steps=STEPS, batch_size=12, micro_batch_size=2, clip_norm=0.5),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(warmup_steps=2),
        checkpoint=CheckpointConfig(every_steps=2, keep_last=9),
        evaluation=EvaluationConfig(sequences=0),
    )


def _rows(config: RunConfig) -> list[MetricsRow]:
    return list(MetricsFile(pathlib.Path(config.out) / "metrics.jsonl").read())


def _losses(config: RunConfig) -> list[float]:
    return [row.loss for row in _rows(config) if isinstance(row, StepRow)]


def _with(config: RunConfig, out: str, **sections: dict[str, Any]) -> RunConfig:
    changed = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in sections.items()
    }
    return dataclasses.replace(config, out=str(pathlib.Path(config.out).parent / out), **changed)


@pytest.fixture(scope="module")
def alone(config: RunConfig, rank_pool: Pools) -> list[float]:
    """Returns the losses of one process."""
    single = _with(config, "alone")
    rank_pool(1).run(train_rank, single)
    losses = _losses(single)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "torch_ddp", "torch_fsdp2"])
def test_any_strategy_trains_like_one_process(
    config: RunConfig, rank_pool: Pools, alone: list[float], strategy: str
) -> None:
    shared = _with(
        config,
        strategy,
        parallel={"strategy": strategy},
        training={"micro_batch_size": 1},
        logging={"every_steps": 3},
    )
    rank_pool(3).run(train_rank, shared)
    np.testing.assert_allclose(_losses(shared), alone, rtol=1e-5)
    rows = [row for row in _rows(shared) if isinstance(row, StepRow)]
    assert [row.step for row in rows if row.memory_bytes is not None] == [3, 6]
    exposed = [row.step for row in rows if row.exposed_communication_s is not None]
    assert exposed == ([] if strategy == "torch_ddp" else [3, 6])  # DDP does not report it.
    (record,) = RecordStore(pathlib.Path(shared.out) / "record.jsonl").read()
    assert record.case["strategy"] == strategy
    assert record.metrics["loss"].value == pytest.approx(np.mean(alone), rel=1e-5)


def test_uneven_parts_of_a_batch_count_by_their_tokens(config: RunConfig, rank_pool: Pools) -> None:
    even = _with(config, "even", training={"batch_size": 7})
    rank_pool(1).run(train_rank, even)
    uneven = _with(
        config,
        "uneven",
        training={"batch_size": 7, "micro_batch_size": 1},
        parallel={"strategy": "fsdp"},
    )
    rank_pool(3).run(train_rank, uneven)
    np.testing.assert_allclose(_losses(uneven), _losses(even), rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "compression"),
    [
        *(("ddp", "int4"), ("ddp", "none"), ("zero2", "int4"), ("zero2", "none")),
        *(("fsdp", "none"), ("torch_ddp", "none")),
    ],
)
def test_a_run_that_goes_on_is_equal_to_the_bit(
    config: RunConfig, rank_pool: Pools, strategy: str, compression: str
) -> None:
    parallel = {"strategy": strategy, "compression": compression}
    name = f"{strategy}-{compression}"
    whole = _with(config, f"whole-{name}", parallel=parallel)
    rank_pool(2).run(train_rank, whole)
    again = _with(config, f"again-{name}", parallel=parallel)
    rank_pool(2).run(train_rank, again)
    for checkpoint in sorted((pathlib.Path(again.out) / "checkpoints").iterdir())[1:]:
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()  # As if killed after the first checkpoint.
    rank_pool(2).run(train_rank, again)
    assert _losses(again) == _losses(whole)
    expected, found = _saved(whole), _saved(again)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    has_residuals = any(name.startswith("residual.") for name in expected)
    assert has_residuals == (compression != "none")


def _saved(config: RunConfig) -> dict[str, Tensor]:
    """Returns all tensors of the last checkpoint. Which rank saved one is not part of its state."""
    last = pathlib.Path(config.out) / "checkpoints" / f"step-{STEPS:08}"
    files = list(last.glob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_other_ranks_and_strategies_go_on(
    config: RunConfig, rank_pool: Pools, alone: list[float]
) -> None:
    moved = _with(config, "moved", training={"steps": 2}, schedule={"name": "constant"})
    expected = _with(config, "expected", schedule={"name": "constant"})
    rank_pool(1).run(train_rank, expected)
    rank_pool(2).run(train_rank, moved)
    for ranks, strategy, steps in ((3, "zero2", 4), (2, "fsdp", 5), (1, "ddp", 6)):
        moved = dataclasses.replace(
            moved,
            parallel=ParallelConfig(strategy=strategy),  # type: ignore[arg-type]
            training=dataclasses.replace(moved.training, steps=steps),
        )
        rank_pool(ranks).run(train_rank, moved)
    np.testing.assert_allclose(_losses(moved), _losses(expected), rtol=1e-5)


def test_muon_and_adamw_go_on_together(config: RunConfig, rank_pool: Pools) -> None:
    both = _with(config, "muon", optimizer={"name": "muon"}, training={"steps": 4})
    rank_pool(2).run(train_rank, both)
    rank_pool(2).run(train_rank, dataclasses.replace(both, training=config.training))
    whole = _with(config, "muon-whole", optimizer={"name": "muon"})
    rank_pool(2).run(train_rank, whole)
    assert len(_losses(both)) == STEPS
    assert _losses(both)[:2] == _losses(whole)[:2]


def test_held_out_loss_does_not_depend_on_ranks(
    config: RunConfig, rank_pool: Pools, tmp_path: pathlib.Path
) -> None:
    held_out = tmp_path / "held-out"
    storage = open_storage(held_out)
    write_dataset(held_out, random_documents(900, seed=1), split="heldout", shard_tokens=1000)
    splits = read_manifest(storage).splits
    write_dataset(held_out, random_documents(3000), split="train", shard_tokens=1000)
    manifest = read_manifest(storage)
    manifest = msgspec.structs.replace(manifest, splits={**splits, **manifest.splits})
    storage.write(MANIFEST, encode_manifest(manifest))
    found = []
    for ranks in (1, 3):
        evaluated = _with(
            config,
            f"evaluated-{ranks}",
            data={"sources": (SourceConfig(place=str(held_out)),)},
            evaluation={"sequences": 10, "every_steps": 4},
            training={"micro_batch_size": 3},
        )
        rank_pool(ranks).run(train_rank, evaluated)
        found.append([row.loss for row in _rows(evaluated) if isinstance(row, EvaluationRow)])
    assert len(found[0]) == 2
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_what_cannot_be_trained_is_named(config: RunConfig, rank_pool: Pools) -> None:
    with pytest.raises(RankError, match=r"model\.vocab_size to 256"):
        rank_pool(2).run(train_rank, _with(config, "small", model={"vocab_size": 100}))
    with pytest.raises(RankError, match="muon needs whole matrices"):
        rank_pool(2).run(
            train_rank,
            _with(config, "split", optimizer={"name": "muon"}, parallel={"strategy": "fsdp"}),
        )
    with pytest.raises(RankError, match="3 ranks without a sequence"):
        rank_pool(3).run(train_rank, _with(config, "few", training={"batch_size": 2}))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "torch_fsdp2"])
def test_a_run_that_diverges_says_where_and_keeps_its_state(
    config: RunConfig, rank_pool: Pools, strategy: str
) -> None:
    diverging = _with(
        config,
        f"diverging-{strategy}",
        optimizer={"learning_rate": 1e30},
        parallel={"strategy": strategy},
    )
    with pytest.raises(RankError, match="no rank has applied the update") as caught:
        rank_pool(2).run(train_rank, diverging)
    message = str(caught.value)
    assert re.search(r"rank \d \(samples [\d,]+ to [\d,]+\): the (output|gradient) of \w+", message)
    kept = list_checkpoints(pathlib.Path(diverging.out) / "diverged")
    assert [each.problem for each in kept] == [""]


def _run_out_of_memory(rank: int, world_size: int, config: RunConfig) -> None:
    error = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory"
    )
    with mock.patch("paceline.training.run.train", side_effect=error):
        train_rank(rank, world_size, config)


def test_out_of_memory_is_said_with_what_was_predicted(config: RunConfig, rank_pool: Pools) -> None:
    expected = (
        r"rank 0 is out of memory \(predicted: a step needs .* lower training\.micro_batch_size"
    )
    with pytest.raises(RankError, match=expected):
        rank_pool(1).run(_run_out_of_memory, _with(config, "exhausted"))


def _explain(rank: int, _world_size: int) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    inputs = torch.full((1, 2), torch.inf if rank == 1 else 1.0)
    return explain_nonfinite(model, lambda: model(inputs).sum().backward(), f"sample {rank}")


def test_the_rank_and_the_module_that_are_not_finite_are_named(rank_pool: Pools) -> None:
    for explanation in rank_pool(2).run(_explain):
        assert explanation == "rank 1 (sample 1): the output of 0 is the first that is not finite"
