"""Shapes and types of the numerical rooms are checked at run time, in tests only."""

import os

import jaxtyping
import torch

if not torch.cuda.is_available():
    # Triton looks when it is first imported: its kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Not the operators of torch, which it compiles, nor the kernels of Triton, whose source it reads.
CHECKED = [f"paceline.kernels.attention.{name}" for name in ("inputs", "reference", "tiled")]

with jaxtyping.install_import_hook([*CHECKED, "paceline.models"], "beartype.beartype"):
    import paceline.kernels
    import paceline.kernels.attention.tiled
    import paceline.models  # noqa: F401
