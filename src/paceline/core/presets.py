"""Named model shapes: the courses' sizes and a few published models.

Sources: the sizes small to 10B are those of the Stanford CS336 systems hand-outs (2025 and
2026). xxl is from its communication accounting problem, which omits attention, embeddings and
output layer; its feed-forward layers are two plain matrices. bytes-34M is our own.
Llama 3: Grattafiori et al. 2024, table 3. GPT-3: Brown et al. 2020, table 2.1. Llama 2: Touvron
et al. 2023 and the config.json of its weights. Mistral: Jiang et al. 2023, table 1. megatron: the
two largest of Korthikanti et al. 2022, table 3. Mixtures of experts: the config.json of their
weights, with the context length of most of their pretraining (Jiang et al. 2024, DeepSeek-AI 2024,
Qwen Team 2025). Latent attention has scores and values of different widths; the preset has their
mean.
"""

from typing import Any, NamedTuple

from paceline.core.errors import UsageError, unknown_name
from paceline.core.specs import Experts, ModelShape

_DIMENSIONS = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")


def _shape(*dimensions: int, **others: Any) -> ModelShape:
    named: dict[str, Any] = dict(zip(_DIMENSIONS, dimensions, strict=True))
    return ModelShape(**named, **others)


_LLAMA3 = {"num_kv_heads": 8, "max_context_length": 8192, "rope_theta": 500_000.0}
_LLAMA2 = {"max_context_length": 4096}
_MEGATRON: dict[str, Any] = {
    "feed_forward": "gelu",
    "norm": "layernorm",
    "positions": "learned",
    "biases": True,
    "tied_embeddings": True,
}
_PRESETS: dict[str, ModelShape] = {
    "small": _shape(10_000, 768, 3072, 12, 12),
    "medium": _shape(10_000, 1024, 4096, 24, 16),
    "large": _shape(10_000, 1280, 5120, 36, 20),
    "xl": _shape(10_000, 1600, 6400, 48, 25),
    "2.7B": _shape(10_000, 2560, 10240, 32, 32),
    "10B": _shape(10_000, 4608, 12288, 50, 36),
    "xxl": _shape(0, 16384, 53248, 126, 0, feed_forward="linear", norm="none", positions="none"),
    # Models that train on a laptop. The data-parallel figures use the second.
    "bytes-6M": _shape(256, 256, 1024, 6, 4),
    "bytes-34M": _shape(256, 512, 2048, 8, 8),
    "words-44M": _shape(10_000, 768, 3072, 3, 12),
    "llama3-8B": _shape(128_256, 4096, 14336, 32, 32, **_LLAMA3),
    "llama3-70B": _shape(128_256, 8192, 28672, 80, 64, **_LLAMA3),
    "llama3-405B": _shape(128_256, 16384, 53248, 126, 128, **_LLAMA3),
    "llama2-7B": _shape(32_000, 4096, 11008, 32, 32, **_LLAMA2),
    "llama2-13B": _shape(32_000, 5120, 13824, 40, 40, **_LLAMA2),
    "llama2-70B": _shape(32_000, 8192, 28672, 80, 64, num_kv_heads=8, **_LLAMA2),
    "mistral-7B": _shape(32_000, 4096, 14336, 32, 32, num_kv_heads=8, max_context_length=8192),
    "gpt3-175B": _shape(50_257, 12288, 49152, 96, 96, **_MEGATRON),
    "megatron-530B": _shape(51_200, 20480, 81920, 105, 128, **_MEGATRON),
    "megatron-1T": _shape(51_200, 25600, 102400, 128, 160, **_MEGATRON),
}


class Preset(NamedTuple):
    """A named model: its shape, and its experts if it is a mixture of experts."""

    shape: ModelShape
    """For a mixture, `d_ff` is the active width, averaged over the blocks."""
    experts: Experts | None = None


def _mixture(
    experts: Experts, vocab_size: int, d_model: int, num_layers: int, num_heads: int, **others: Any
) -> Preset:
    active = experts.active_width(num_layers)
    return Preset(_shape(vocab_size, d_model, active, num_layers, num_heads, **others), experts)


_QWEN3: dict[str, Any] = {"head_dim": 128, "max_context_length": 4096, "rope_theta": 1_000_000.0}
_MIXTURES: dict[str, Preset] = {
    "mixtral-8x7B": _mixture(
        Experts(num_experts=8, experts_per_token=2, width=14336),
        *(32_000, 4096, 32, 32),
        num_kv_heads=8,
        max_context_length=32_768,
        rope_theta=1_000_000.0,
    ),
    "qwen3-30B-A3B": _mixture(
        Experts(num_experts=128, experts_per_token=8, width=768),
        *(151_936, 2048, 48, 32),
        num_kv_heads=4,
        **_QWEN3,
    ),
    "qwen3-235B-A22B": _mixture(
        Experts(num_experts=128, experts_per_token=8, width=1536),
        *(151_936, 4096, 94, 64),
        num_kv_heads=4,
        **_QWEN3,
    ),
    "deepseek-v3": _mixture(
        Experts(
            num_experts=256,
            experts_per_token=8,
            width=2048,
            shared_width=2048,
            num_dense_layers=3,
            dense_width=18_432,
        ),
        *(129_280, 7168, 61, 128),
        head_dim=160,
        attention_weights=187_105_280,
        max_context_length=4096,
    ),
}


def preset_names() -> tuple[str, ...]:
    """Returns the names that `model_preset` accepts, smallest family first."""
    return tuple(_PRESETS)


def mixture_names() -> tuple[str, ...]:
    """Returns the names of the mixtures of experts, which `find_preset` also accepts."""
    return tuple(_MIXTURES)


def preset_spelling(name: str) -> str:
    """Returns the preset name that equals `name` ignoring case; any other name unchanged."""
    known = (*_PRESETS, *_MIXTURES)
    return next((each for each in known if each.lower() == name.lower()), name)


def model_preset(name: str) -> ModelShape:
    """Returns the shape called `name`; raises an error that lists `preset_names` if unknown."""
    if name in _PRESETS:
        return _PRESETS[name]
    if name in _MIXTURES:
        raise UsageError(
            f"{name} is a mixture of experts, which only paceline plan search accounts for; "
            f"known here: {', '.join(_PRESETS)}"
        )
    raise unknown_name("unknown model", name, _PRESETS)


def find_preset(name: str) -> Preset:
    """Returns the model called `name`, dense or a mixture of experts."""
    if name in _MIXTURES:
        return _MIXTURES[name]
    if name in _PRESETS:
        return Preset(_PRESETS[name])
    raise unknown_name("unknown model", name, (*_PRESETS, *_MIXTURES))
