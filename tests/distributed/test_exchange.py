"""Models trained by ranks are exported as one model, and ranks train imported models."""

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from paceline.data.tokenizer import byte_tokenizer_json
from paceline.models import TransformerLM
from paceline.models.hugging_face import from_llama, read_weights
from paceline.parallel import RankError, RankPool
from paceline.training.config import RunConfig
from paceline.training.exchange import export_model, import_model, open_saved_model
from tests.distributed.small_runs import changed, losses_of, small_run, train_rank

Pools = Callable[[int], RankPool]


@pytest.fixture
def config(tmp_path: pathlib.Path) -> RunConfig:
    return small_run(tmp_path)


def test_a_run_of_any_strategy_leaves_and_comes_back(
    config: RunConfig, rank_pool: Pools, tmp_path: pathlib.Path
) -> None:
    first = changed(config, "first", parallel={"strategy": "fsdp"})
    rank_pool(2).run(train_rank, first)
    assert (tmp_path / "first" / "tokenizer.json").read_text() == byte_tokenizer_json()
    saved = open_saved_model(first.out)
    export_model(saved, tmp_path / "model")
    shape = config.model.shape
    model = TransformerLM(shape)
    model.load_state_dict(saved.read(saved.tensors))
    weights = from_llama(read_weights(tmp_path / "model"), shape)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

    losses = []
    for ranks, strategy in ((1, "ddp"), (2, "zero2"), (2, "torch_fsdp2")):
        again = changed(config, f"again-{strategy}", parallel={"strategy": strategy})
        import_model(tmp_path / "model", pathlib.Path(again.out))
        rank_pool(ranks).run(train_rank, again)
        losses.append(losses_of(again))
    # Training starts from the trained weights, at the beginning of the data.
    assert losses[0][0] < losses_of(first)[0]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)


def test_another_model_and_another_tokenizer_are_named(
    config: RunConfig, rank_pool: Pools, tmp_path: pathlib.Path
) -> None:
    rank_pool(1).run(train_rank, config)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=96))
    with pytest.raises(RankError, match=r"is of another model: d_ff 64 instead of 96; change out"):
        rank_pool(1).run(train_rank, other)
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    with pytest.raises(RankError, match=r"tokenizer\.json is not the tokenizer of"):
        rank_pool(1).run(train_rank, config)
