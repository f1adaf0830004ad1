"""Models of Korthikanti et al. 2022."""

from paceline.core import ModelShape


def megatron_shape(width: int, heads: int, layers: int) -> ModelShape:
    """Returns the shape of one of the paper's models."""
    return ModelShape(
        vocab_size=51_200,
        d_model=width,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=heads,
        feed_forward="gelu",
        norm="layernorm",
        positions="learned",
        biases=True,
        tied_embeddings=True,
    )
