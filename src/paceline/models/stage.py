"""A part of a language model: consecutive blocks, with the embedding or the head at its ends.

Modules and parameters keep the names that they have in the whole model, such as
``blocks.3.attention.query.weight``, so that the stages of a pipeline together have the state
dictionary of the model, however it was cut.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.models.transformer import TransformerLM, run_blocks


class TransformerStage(nn.Module):
    """Some blocks of a model, whose modules it takes over.

    Args:
        model: The whole model; what no stage takes of it is free to go.
        blocks: Numbers of the blocks. The first brings the embedding with it, the last the head.
        has_embedding: Whether it has the embedding without the first block, too: under whose name
            a tied head is known.
    """

    def __init__(
        self, model: TransformerLM, blocks: Sequence[int], *, has_embedding: bool = False
    ) -> None:
        super().__init__()
        is_last = model.shape.num_layers - 1 in blocks
        self.shape = model.shape
        self.activation_checkpointing = model.activation_checkpointing
        self.embedding = model.embedding if 0 in blocks or has_embedding else None
        self.positions = model.positions
        self.blocks = nn.ModuleList()
        for number in blocks:
            self.blocks.add_module(str(number), model.blocks[number])
        self.final_norm = model.final_norm if is_last else None
        self.head = model.head if is_last else None

    @property
    def max_context_length(self) -> int:
        """Longest sequence that the model accepts."""
        return self.shape.max_context_length

    def forward(self, x: Tensor) -> Float[Tensor, "batch sequence width"]:
        """Returns the stream after its blocks, or the logits if it has the head.

        Args:
            x: Tokens if it has the embedding, otherwise the stream that the stage before returned.
        """
        if self.embedding is not None:
            x = self.embedding(x)
        recompute = self.activation_checkpointing == "full" and torch.is_grad_enabled()
        x = run_blocks(self.blocks, x, self.positions, recompute=recompute)
        if self.final_norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.final_norm(x))
        return logits

    def compile_blocks(self) -> None:
        """Compiles every block on its own, in place."""
        for block in self.blocks:
            block.compile()
