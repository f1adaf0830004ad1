"""What ranks have trained leaves as one model; what comes from elsewhere is trained by ranks."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from paceline.data.loader.config import SourceConfig
from paceline.data.tokenizer import byte_tokenizer_json
from paceline.models import TransformerLM
from paceline.models.hugging_face.files import read_weights
from paceline.models.hugging_face.llama import from_llama
from paceline.parallel import RankError, RankPool, Session
from paceline.parallel.ranks.placement import Placement
from paceline.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StepConfig,
)
from paceline.training.exchange.export import export_model
from paceline.training.exchange.import_model import import_model
from paceline.training.exchange.saved_model import open_saved_model
from paceline.training.metrics.rows import MetricsFile, StepRow
from paceline.training.run import run
from tests.unit.data.dataset_factory import random_documents, write_dataset

Pools = Callable[[int], RankPool]


@pytest.fixture
def config(tmp_path: pathlib.Path) -> RunConfig:
    tokens = tmp_path / "tokens"
    tokenizer = byte_tokenizer_json().encode()
    write_dataset(tokens, random_documents(2000), shard_tokens=1000, tokenizer=tokenizer)
    return RunConfig(
        out=str(tmp_path / "run"),
        model=ModelConfig(num_layers=2, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2),
        data=DataConfig(sources=(SourceConfig(place=str(tokens)),), context_length=16),
        training=StepConfig(steps=3, batch_size=4, micro_batch_size=2),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(name="constant", warmup_steps=0),
        checkpoint=CheckpointConfig(every_steps=3),
        evaluation=EvaluationConfig(sequences=0),
    )


def _train(_rank: int, _world_size: int, config: RunConfig) -> None:
    placement = Placement(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=dist.get_rank(),
        local_world_size=dist.get_world_size(),
        num_hosts=1,
        host=0,
        launcher="spawn",
    )
    run(config, Session(placement=placement, device=torch.device("cpu"), backend="gloo"))


def _losses(config: RunConfig) -> list[float]:
    rows = MetricsFile(pathlib.Path(config.out) / "metrics.jsonl").read()
    return [row.loss for row in rows if isinstance(row, StepRow)]


def _with(config: RunConfig, out: str, **sections: dict[str, Any]) -> RunConfig:
    changed = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in sections.items()
    }
    return dataclasses.replace(config, out=str(pathlib.Path(config.out).parent / out), **changed)


def test_a_run_of_any_strategy_leaves_and_comes_back(
    config: RunConfig, rank_pool: Pools, tmp_path: pathlib.Path
) -> None:
    first = _with(config, "first", parallel={"strategy": "fully_sharded"})
    rank_pool(2).run(_train, first)
    assert (tmp_path / "first" / "tokenizer.json").read_text() == byte_tokenizer_json()
    saved = open_saved_model(first.out)
    export_model(saved, tmp_path / "model")
    shape = config.model.shape
    model = TransformerLM(shape)
    model.load_state_dict(saved.read(saved.tensors))
    weights = from_llama(read_weights(tmp_path / "model"), shape)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

    losses = []
    for ranks, strategy in ((1, "bucketed"), (2, "sharded"), (2, "torch_fsdp2")):
        again = _with(config, f"again-{strategy}", parallel={"strategy": strategy})
        import_model(tmp_path / "model", pathlib.Path(again.out))
        rank_pool(ranks).run(_train, again)
        losses.append(_losses(again))
    # From the trained weights, on the data from its beginning.
    assert losses[0][0] < _losses(first)[0]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)


def test_another_model_and_another_tokenizer_are_named(
    config: RunConfig, rank_pool: Pools, tmp_path: pathlib.Path
) -> None:
    rank_pool(1).run(_train, config)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=96))
    with pytest.raises(RankError, match=r"is of another model: d_ff 64 instead of 96; change out"):
        rank_pool(1).run(_train, other)
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    with pytest.raises(RankError, match=r"tokenizer\.json is another tokenizer than that of"):
        rank_pool(1).run(_train, config)
