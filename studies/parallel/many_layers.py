"""A model of many small layers, in which only the cost of calls matters."""

import torch
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    """A block with six parameters of a few elements each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input plus the output of a small MLP."""
        added: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + added


class Stack(nn.Module):
    """Many blocks in a `ModuleList`, which containers that shard by layer recognize."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Runs all blocks."""
        for block in self.blocks:
            x = block(x)
        return x
