"""Parameters and FLOPs of models of Hugging Face, against transformers and torch's flop counter."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.accounting.counts import all_parameters, count_parameters, flops_per_token
from paceline.accounting.model_config import model_of_config, model_types
from paceline.accounting.named_model import find_model
from paceline.core.errors import PacelineError, UsageError
from paceline.core.presets import find_preset
from paceline.core.specs import BatchShape
from paceline.core.strategies import StrategyName
from paceline.predict.strategy_memory import step_plan
from tests.unit.accounting.published_configs import CONFIGS

_CONTEXT = 128
_OF_ROUTERS = 0.01
"""The share of FLOPs that routers may have: they are not counted."""


def _transformers_model(config: dict[str, Any]) -> torch.nn.Module:
    """Returns the model of transformers on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            settings, attn_implementation="eager"
        )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # The others look at tokens.
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    found = model_of_config(CONFIGS[name], name)
    model = _transformers_model(CONFIGS[name])
    theirs = sum(parameter.numel() for parameter in model.parameters())
    assert all_parameters(found.shape, found.experts) == theirs


def test_every_type_has_a_published_model() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(model_types())


@pytest.mark.parametrize("kind", model_types())
def test_flops_are_those_of_torchs_counter(kind: str) -> None:
    *_, config = (each for each in CONFIGS.values() if each["model_type"] == kind)
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    config = config | {layers: 4}
    found = model_of_config(config, kind)
    model = _transformers_model(config)
    scores: Any = torch.zeros(1, 1, _CONTEXT, _CONTEXT, device="meta")
    if kind in ("gemma2", "gemma3_text", "gpt_oss"):
        scores = {"full_attention": scores, "sliding_attention": scores}
    tokens = torch.zeros(1, _CONTEXT, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, attention_mask=scores, use_cache=False)
    theirs = counter.get_total_flops() / _CONTEXT
    ours = flops_per_token(found.shape, _CONTEXT).forward
    if found.experts is None:
        assert ours == pytest.approx(theirs, rel=1e-6)
    else:
        assert theirs * (1 - _OF_ROUTERS) <= ours <= theirs


def test_defaults_that_a_file_leaves_out_are_those_of_its_type() -> None:
    from transformers import AutoConfig

    for kind in model_types():
        full = AutoConfig.for_model(kind).to_dict() | {"num_experts_per_tok": 2}
        config = next(each for each in CONFIGS.values() if each["model_type"] == kind)
        sizes = {key: full[key] for key in (*config, "num_local_experts") if key in full}
        short, whole = (
            model_of_config(each, kind) for each in ({**sizes, "model_type": kind}, full)
        )
        assert short.shape.tied_embeddings == whole.shape.tied_embeddings, kind
        assert all_parameters(short.shape, short.experts) == all_parameters(
            whole.shape, whole.experts
        )


def test_what_is_not_counted_is_said() -> None:
    mistral = CONFIGS["Mistral 7B"] | {"sliding_window": 4096}
    assert "windows of 4,096 tokens" in model_of_config(mistral, "x").notes[0]
    qwen = CONFIGS["Qwen2 7B"] | {"sliding_window": 4096}
    assert not model_of_config(qwen, "x").notes
    assert model_of_config(qwen | {"use_sliding_window": True}, "x").notes
    further = CONFIGS["DeepSeek V3"] | {"num_nextn_predict_layers": 1}
    assert "further tokens" in model_of_config(further, "x").notes[0]
    text = CONFIGS["Gemma 3 4B"]
    pictures = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    found = model_of_config(pictures, "x")
    assert "only the language model" in found.notes[0]
    assert found.shape == model_of_config(text, "x").shape


def test_what_published_configs_of_gemma_3_leave_out_is_transformers_default() -> None:
    from transformers import Gemma3TextConfig

    defaults = Gemma3TextConfig().to_dict()
    config = {key: value for key, value in defaults.items() if key != "rope_parameters"}
    assert model_of_config({"model_type": "gemma3_text"}, "x") == model_of_config(config, "x")
    # As in google/gemma-3-4b-it, without the sizes of the tower for images.
    stated = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    text = {"model_type": "gemma3_text", "sliding_window": 1024, **stated}
    found = model_of_config({"model_type": "gemma3", "text_config": text}, "x")
    whole = {"max_position_embeddings": 131_072, **CONFIGS["Gemma 3 4B"]}
    assert found.shape.d_model == 2560
    assert count_parameters(found.shape) == count_parameters(model_of_config(whole, "x").shape)


def test_models_of_other_kinds_are_refused_with_what_is_known() -> None:
    with pytest.raises(UsageError, match=r"'mamba' is not accounted for; .*known: llama, mistral"):
        model_of_config({"model_type": "mamba"}, "config.json")
    with pytest.raises(UsageError, match="did you mean 'qwen3'"):
        model_of_config({"model_type": "qwen4"}, "config.json")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Llama 3 8B", {"hidden_size": "wide"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ("Llama 3 8B", {"vocab_size": None}, "missing required field `vocab_size`"),
        ("Llama 3 8B", {"intermediate_size": None}, "intermediate_size is missing"),
        ("Llama 3 8B", {"num_attention_heads": 0}, r"`int` >= 1 - at `\$.num_attention_heads`"),
        ("Llama 3 8B", {"num_key_value_heads": 3}, "num_kv_heads"),
        ("Llama 3 8B", {"rope_parameters": {"rope_theta": "far"}}, "is 'far', not a number"),
        ("Qwen3 30B A3B", {"decoder_sparse_step": 0}, r"`int` >= 1 - at `\$.decoder_sparse_step`"),
        ("Qwen3 30B A3B", {"moe_intermediate_size": 0}, "Experts.width is 0"),
        ("Qwen3 30B A3B", {"num_experts_per_tok": 129}, "experts_per_token"),
    ],
)
def test_damaged_files_are_errors_of_one_line(
    name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(PacelineError, match=rf"^x: .*{message}"):
        model_of_config(CONFIGS[name] | change, "x")


def test_a_model_is_named_by_preset_file_directory_or_dimensions(tmp_path: pathlib.Path) -> None:
    shape, _ = find_preset("llama3-8B")
    assert find_model("LLAMA3-8b") == ("llama3-8B", shape, None, ())

    directory = tmp_path / "Llama-3-8B"
    directory.mkdir()
    config = CONFIGS["Llama 3 8B"] | {"max_position_embeddings": 8192, "rope_theta": 500_000.0}
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    for path in (directory, directory / "config.json"):
        found = find_model(str(path))
        assert found.name == "Llama-3-8B"
        assert found.shape == dataclasses.replace(shape, head_dim=found.shape.head_dim)

    text = "d_model=4096,num_layers=32,num_heads=32,num_kv_heads=8,d_ff=14336,vocab_size=128256"
    named = find_model(text)
    assert named.name == "custom"
    assert count_parameters(named.shape) == count_parameters(shape)

    (tmp_path / "wide.toml").write_text('[model]\npreset = "llama3-8B"\nd_ff = 16384\n[data]\n')
    wide = find_model(str(tmp_path / "wide.toml"))
    assert (wide.name, wide.shape) == ("wide", dataclasses.replace(shape, d_ff=16_384))

    (tmp_path / "run.toml").write_text('[model]\nhugging_face = "Llama-3-8B"\n')
    assert find_model(str(tmp_path / "run.toml")) == find_model(str(directory))


def test_experts_are_dimensions_too(tmp_path: pathlib.Path) -> None:
    preset = find_preset("qwen3-30B-A3B")
    toml = tmp_path / "sparse.toml"
    toml.write_text(
        "[model]\nd_model = 2048\nnum_layers = 48\nnum_heads = 32\nnum_kv_heads = 4\n"
        "head_dim = 128\nvocab_size = 151936\nmax_context_length = 4096\nrope_theta = 1e6\n"
        "[model.experts]\nnum_experts = 128\nexperts_per_token = 8\nwidth = 768\n"
    )
    assert find_model(str(toml))[1:3] == preset
    named = find_model(
        "d_model=2048,num_layers=48,num_heads=32,num_kv_heads=4,head_dim=128,vocab_size=151936,"
        "experts.num_experts=128,experts.experts_per_token=8,experts.width=768"
    )
    assert named.experts == preset.experts


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("lama3-8B", "did you mean 'llama3-8B'.*directory of a Hugging Face model"),
        ("nowhere/model", "nowhere/model/config.json: no such file"),
        ("nowhere.toml", "nowhere.toml: no such file"),
        ("d_model=4096", "missing required field"),
        ("d_model=wide,num_layers=1,num_heads=1,d_ff=1,vocab_size=1", "Expected `int`, got `str`"),
        ("d_modell=4096", "unknown field 'd_modell'; did you mean 'd_model'"),
        ("d_model=100,num_layers=1,num_heads=3,d_ff=1,vocab_size=1", "not divisible by num_heads"),
        ("preset=qwen3-30B-A3B,num_layers=0", "num_layers"),
    ],
)
def test_names_that_mean_nothing_get_the_remedy(named: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_model(named)


@pytest.mark.parametrize("name", ["Llama 3 8B", "GPT-2", "Qwen3 30B A3B", "DeepSeek V3"])
@pytest.mark.parametrize("strategy", ["none", "zero1", "fsdp"])
def test_memory_of_states_is_that_of_the_parameters(name: str, strategy: StrategyName) -> None:
    found = model_of_config(CONFIGS[name], name)
    plan = step_plan(
        found, batch=BatchShape(num_sequences=1, context_length=128), strategy=strategy
    )
    size = all_parameters(found.shape, found.experts)
    assert plan.kept_for_backward.total <= plan.peak_bytes(8)
    states = plan.instants(8)["before_step"]
    if strategy == "none":
        assert states.parameters == 4 * size
        assert states.gradients == 4 * size
        # AdamW counts the steps of each of at most a thousand tensors.
        assert 0 <= states.optimizer_state - 8 * size <= 4 * 1000
    else:
        # Shards are padded.
        assert states.optimizer_state == pytest.approx(size, rel=1e-4)
