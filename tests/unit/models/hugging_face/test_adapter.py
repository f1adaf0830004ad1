"""Tests that models of transformers can be called like ours, and that unknown ones are refused."""

import pathlib
import sys
from typing import Any

import pytest
import torch

from paceline.accounting.model_config import read_config_json
from paceline.core.errors import UsageError
from paceline.models.generation import generate
from paceline.models.hugging_face import HuggingFaceLM, hugging_face_layout

transformers = pytest.importorskip("transformers", reason="adapts its models")


def _gpt2(**changes: Any) -> Any:
    return transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=3,
        eos_token_id=3, **changes,
    )  # fmt: skip


def test_without_weights_the_seed_decides(tmp_path: pathlib.Path) -> None:
    _gpt2(dtype="bfloat16").save_pretrained(tmp_path)
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(HuggingFaceLM.of_directory(tmp_path))
    weights = [model.inner.transformer.wte.weight for model in models]
    assert weights[0].dtype == torch.float32
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_weights_of_the_directory_are_taken(tmp_path: pathlib.Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_config(_gpt2()).eval()
    theirs.save_pretrained(tmp_path)
    model = HuggingFaceLM.of_directory(tmp_path).eval()
    tokens = torch.randint(64, (2, 9))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits)
    assert model.max_context_length == 32


def test_text_is_what_transformers_generates(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = HuggingFaceLM(transformers.AutoModelForCausalLM.from_config(_gpt2())).eval()
    prompt = torch.tensor([5, 6, 7])
    expected = model.inner.generate(
        prompt[None], do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
    )
    assert list(generate(model, prompt, 12, temperature=0)) == expected[0, 3:].tolist()
    assert len(list(generate(model, prompt, 100, temperature=0))) == 29


def test_tied_embeddings_are_in_the_files_once(tmp_path: pathlib.Path) -> None:
    _gpt2().save_pretrained(tmp_path)
    config, names = hugging_face_layout(read_config_json(tmp_path))
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert names["inner.transformer.wte.weight"] == "transformer.wte.weight"
    assert "inner.lm_head.weight" not in names
    _, names = hugging_face_layout(config | {"tie_word_embeddings": False})
    assert names["inner.lm_head.weight"] == "lm_head.weight"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[hf\]'"):
        HuggingFaceLM.of_config({"model_type": "gpt2"})


def test_what_transformers_does_not_know_is_named() -> None:
    with pytest.raises(UsageError, match="knows no model_type 'own'; code that comes with"):
        HuggingFaceLM.of_config({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}})
    with pytest.raises(UsageError, match="model_type is missing"):
        HuggingFaceLM.of_config({})


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "auto_map"])
def test_a_config_cannot_name_code_to_fetch(key: str) -> None:
    """transformers would fetch a kernel of that name from a hub, and run it."""
    config = _gpt2().to_dict() | {key: "someone/kernel", "nested": {key: "someone/kernel"}}
    model = HuggingFaceLM.of_config(config)
    assert model.inner.config._attn_implementation == "sdpa"
    assert "someone" not in str(model.inner.config)
