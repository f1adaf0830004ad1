"""A pipeline stage of a language model: consecutive blocks, with embedding or head at the ends.

Modules and parameters keep their names from the whole model, such as
``blocks.3.attention.query.weight``. So the state dictionaries of all stages together are the
state dictionary of the model, regardless of how it was split.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.models.transformer import TransformerLM, run_blocks


class TransformerStage(nn.Module):
    """Some blocks of a model; shares the model's modules.

    Args:
        model: The whole model; its modules outside the stage can be freed.
        blocks: Numbers of the blocks. The first includes the embedding, the last includes the head.
        has_embedding: Whether to include the embedding even without the first block: a tied head
            is stored under its name.
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
        """Returns the residual stream after the stage's blocks, or the logits if it has the head.

        Args:
            x: Tokens if it has the embedding, otherwise the output of the previous stage.
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
        """Compiles each block separately, in place."""
        for block in self.blocks:
            block.compile()
