"""The Transformer language model that Paceline trains."""

from paceline.models.transformer import TransformerLM, next_token_loss

__all__ = ["TransformerLM", "next_token_loss"]
