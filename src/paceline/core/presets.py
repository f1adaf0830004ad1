"""Named model shapes: the courses' sizes and a few published models.

Sources: the sizes small to 10B are those of the Stanford CS336 systems hand-outs (2025 and
2026), xxl is that of its communication accounting problem, where attention, embeddings and
output layer are left out and a feed-forward layer is two plain matrices. bytes-34M is our own.
Llama 3: Grattafiori et al. 2024, table 3. GPT-3: Brown et al. 2020, table 2.1.
"""

from paceline.core.errors import UsageError, did_you_mean
from paceline.core.specs import ModelShape


def _course(d_model: int, d_ff: int, num_layers: int, num_heads: int) -> ModelShape:
    return ModelShape(
        vocab_size=10_000, d_model=d_model, d_ff=d_ff, num_layers=num_layers, num_heads=num_heads
    )


def _llama3(d_model: int, d_ff: int, num_layers: int, num_heads: int) -> ModelShape:
    return ModelShape(
        vocab_size=128_256,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        max_context_length=8192,
        rope_theta=500_000.0,
    )


_PRESETS: dict[str, ModelShape] = {
    "small": _course(768, 3072, 12, 12),
    "medium": _course(1024, 4096, 24, 16),
    "large": _course(1280, 5120, 36, 20),
    "xl": _course(1600, 6400, 48, 25),
    "2.7B": _course(2560, 10240, 32, 32),
    "10B": _course(4608, 12288, 50, 36),
    "xxl": ModelShape(
        vocab_size=0,
        d_model=16384,
        d_ff=53248,
        num_layers=126,
        num_heads=0,
        feed_forward="linear",
        norm="none",
        positions="none",
    ),
    # Models that train on a laptop. Data-parallel figures are about the second.
    "bytes-6M": ModelShape(vocab_size=256, d_model=256, d_ff=1024, num_layers=6, num_heads=4),
    "bytes-34M": ModelShape(vocab_size=256, d_model=512, d_ff=2048, num_layers=8, num_heads=8),
    "words-44M": ModelShape(vocab_size=10_000, d_model=768, d_ff=3072, num_layers=3, num_heads=12),
    "llama3-8B": _llama3(4096, 14336, 32, 32),
    "llama3-70B": _llama3(8192, 28672, 80, 64),
    "llama3-405B": _llama3(16384, 53248, 126, 128),
    "gpt3-175B": ModelShape(
        vocab_size=50_257,
        d_model=12288,
        d_ff=49152,
        num_layers=96,
        num_heads=96,
        feed_forward="gelu",
        norm="layernorm",
        positions="learned",
        biases=True,
        tied_embeddings=True,
    ),
}


def preset_names() -> tuple[str, ...]:
    """Returns the names that `model_preset` knows, smallest family first."""
    return tuple(_PRESETS)


def model_preset(name: str) -> ModelShape:
    """Returns the named shape; an unknown name is an error that lists the known ones.

    Args:
        name: One of `preset_names`.
    """
    if name in _PRESETS:
        return _PRESETS[name]
    hint = did_you_mean(name, _PRESETS)
    raise UsageError(f"unknown model {name!r}; {hint}known: {', '.join(_PRESETS)}")
