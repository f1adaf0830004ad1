"""What the formulas expect of activations, against what torch saves and allocates."""

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from paceline.accounting import peak_activation_bytes, saved_for_backward_bytes
from paceline.core import BatchShape, ModelShape, ShapeError, model_preset
from paceline.models import TransformerLM, next_token_loss
from paceline.traces.memory import peak_allocations

Checkpointing = Literal["none", "full"]

SHAPES = {
    "plain": ModelShape(vocab_size=500, d_model=64, d_ff=256, num_layers=3, num_heads=4),
    "grouped, wide heads": ModelShape(
        vocab_size=96, d_model=64, d_ff=160, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24
    ),
    "large vocabulary, tied": ModelShape(
        vocab_size=4000, d_model=32, d_ff=64, num_layers=1, num_heads=2, tied_embeddings=True
    ),
}
BATCHES = [(1, 4), (3, 20), (4, 64)]


class _Pass:
    """A model and its batch."""

    def __init__(self, shape: ModelShape, batch: BatchShape, checkpointing: Checkpointing) -> None:
        self.model = TransformerLM(shape, activation_checkpointing=checkpointing)
        size = (batch.num_sequences, batch.context_length)
        self.inputs, self.targets = (torch.randint(shape.vocab_size, size) for _ in range(2))

    def forward(self) -> Tensor:
        return next_token_loss(self.model(self.inputs), self.targets)

    def forward_and_backward(self) -> None:
        torch.autograd.backward(self.forward())


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("sizes", BATCHES)
@pytest.mark.parametrize("name", SHAPES)
def test_saved_bytes_are_those_that_torch_packs(
    name: str, sizes: tuple[int, int], checkpointing: Checkpointing
) -> None:
    batch = BatchShape(num_sequences=sizes[0], context_length=sizes[1])
    run = _Pass(SHAPES[name], batch, checkpointing)
    others = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*run.model.parameters(), *run.model.buffers(), run.inputs, run.targets)
    }
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run.forward()
    counted = sum(
        tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in others
    )
    assert saved_for_backward_bytes(SHAPES[name], batch, checkpointing) == counted


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("sizes", BATCHES)
@pytest.mark.parametrize("name", ["plain", "grouped, wide heads"])
def test_the_peak_is_that_of_the_allocations(
    name: str, sizes: tuple[int, int], checkpointing: Checkpointing
) -> None:
    batch = BatchShape(num_sequences=sizes[0], context_length=sizes[1])
    run = _Pass(SHAPES[name], batch, checkpointing)
    run.forward_and_backward()  # From now on there are gradients to add to.
    peak = peak_allocations({"step": run.forward_and_backward})["step"]
    assert peak_activation_bytes(SHAPES[name], batch, checkpointing) == peak


def test_gradients_that_stay_where_they_were_made_add_to_the_peak() -> None:
    shape, batch = SHAPES["plain"], BatchShape(num_sequences=4, context_length=64)
    run = _Pass(shape, batch, "none")
    peak = peak_allocations({"step": run.forward_and_backward})["step"]
    assert peak_activation_bytes(shape, batch, keeps_gradients=True) == peak


def test_a_shape_that_cannot_run_saves_nothing_that_is_known() -> None:
    batch = BatchShape(num_sequences=1, context_length=1)
    with pytest.raises(ShapeError, match="cannot build"):
        saved_for_backward_bytes(model_preset("gpt3-175B"), batch)
