"""The directory of a small run, created without training."""

import pathlib

import msgspec
import torch

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.state import training_state
from paceline.core.specs import ModelShape
from paceline.data.storage import open_storage
from paceline.data.tokenizer import byte_tokenizer_json
from paceline.models import TransformerLM
from paceline.training.run_checkpointer import RunIdentity

SHAPE = ModelShape(
    vocab_size=256, d_model=32, d_ff=64, num_layers=2, num_heads=4, num_kv_heads=2,
    max_context_length=64,
)  # fmt: skip


def save_run(
    run: pathlib.Path | str, shape: ModelShape = SHAPE, steps: tuple[int, ...] = (10,)
) -> TransformerLM:
    """Saves a model with different weights at each step; returns the last."""
    open_storage(run).write("tokenizer.json", byte_tokenizer_json().encode())
    identity = RunIdentity(shape=shape, end_of_document=255, data={"position": 7})
    with Checkpointer(f"{run}/checkpoints", asynchronous=False) as checkpointer:
        for step in steps:
            torch.manual_seed(step)
            model = TransformerLM(shape).eval()
            optimizer = torch.optim.AdamW(model.parameters())
            state = training_state(model, {"adamw": optimizer})
            checkpointer.save(step, state, msgspec.to_builtins(identity))
    return model
