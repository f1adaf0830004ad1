"""The Transformer that everything else trains."""

from paceline.models.transformer import TransformerLM, next_token_loss

__all__ = ["TransformerLM", "next_token_loss"]
