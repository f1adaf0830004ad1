"""Threads, Triton's interpreter, and shapes of the numerical rooms checked at run time."""

import os

import jaxtyping
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # Workers have a core each; more threads would only spin.
if not torch.cuda.is_available():
    # Triton looks when it is first imported: its kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Not the operators of torch, which it compiles, nor the kernels of Triton, whose source it reads.
CHECKED = [f"paceline.kernels.attention.{name}" for name in ("inputs", "reference", "tiled")]

with jaxtyping.install_import_hook([*CHECKED, "paceline.models"], "beartype.beartype"):
    import paceline.kernels
    import paceline.kernels.attention.tiled
    import paceline.models  # noqa: F401
