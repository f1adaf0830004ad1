"""Ranks train a Hugging Face model like one process, and export it in its own format."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline.models.hugging_face import HuggingFaceLM
from paceline.parallel import RankError, RankPool
from paceline.training.config import ModelConfig, RunConfig
from paceline.training.exchange import export_model, load_model, open_saved_model
from paceline.training.metrics import EvaluationRow, MetricsFile
from tests.distributed.small_runs import changed, losses_of, small_run, train_rank

Pools = Callable[[int], RankPool]

transformers = pytest.importorskip("transformers", reason="trains its models")


def _config(name: str) -> Any:
    if name == "gpt2":
        # No dropout: its random numbers would differ between ranks.
        return transformers.GPT2Config(
            vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=255, eos_token_id=255,
        )  # fmt: skip
    return transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_ranks_train_it_like_one_process(
    tmp_path: pathlib.Path, rank_pool: Pools, name: str
) -> None:
    _config(name).save_pretrained(tmp_path / name)
    config = changed(
        small_run(tmp_path),
        "alone",
        evaluation={"sequences": 4, "sample_prompt": "So it", "sample_tokens": 8},
    )
    config = _of(config, tmp_path / name)
    rank_pool(1).run(train_rank, config)
    assert losses_of(config)[-1] < losses_of(config)[0]
    for strategy in ("ddp", "zero2", "fsdp", "torch_fsdp2"):
        shared = changed(config, strategy, parallel={"strategy": strategy})
        rank_pool(2).run(train_rank, shared)
        np.testing.assert_allclose(losses_of(shared), losses_of(config), rtol=1e-5)
        assert _samples(shared) == _samples(config)
    # Resumes from the last checkpoint: it fits this model, and no steps are left.
    rank_pool(2).run(train_rank, shared)

    export_model(open_saved_model(shared.out), tmp_path / "out", max_shard_bytes=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = load_model(shared.out).model
    assert isinstance(ours, HuggingFaceLM)
    tokens = torch.randint(256, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=0)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 255
    assert load_model(str(tmp_path / "out")).tokenizer.end_of_document == 255


@pytest.mark.slow
def test_what_does_not_fit_is_named(tmp_path: pathlib.Path, rank_pool: Pools) -> None:
    config = small_run(tmp_path)
    _config("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(RankError, match="is more than the 64 positions"):
        rank_pool(1).run(
            train_rank, changed(_of(config, tmp_path / "llama"), "o", data={"context_length": 65})
        )
    transformers.LlamaConfig(vocab_size=100).save_pretrained(tmp_path / "small")
    with pytest.raises(RankError, match=r"set vocab_size in .*config\.json to 256 or more"):
        rank_pool(1).run(train_rank, _of(config, tmp_path / "small"))


def _of(config: RunConfig, directory: pathlib.Path) -> RunConfig:
    return dataclasses.replace(config, model=ModelConfig(hugging_face=str(directory)))


def _samples(config: RunConfig) -> list[str | None]:
    rows = MetricsFile(pathlib.Path(config.out) / "metrics.jsonl").read()
    return [row.sample for row in rows if isinstance(row, EvaluationRow)]
