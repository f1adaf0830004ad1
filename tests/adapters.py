"""Adapter functions that the courses' own tests call, for all editions of the courses.

A student copies a course's tests into the directory of this file.
"""

from typing import Any

import torch
from torch import Tensor, nn

from paceline.kernels import TiledAttentionFunction, TritonAttentionFunction
from paceline.parallel import (
    BucketedDataParallel,
    DataParallel,
    FullyShardedDataParallel,
    OverlappedDataParallel,
    ShardedOptimizer,
    WrapPolicy,
)


def get_flashattention_autograd_function_pytorch() -> type:
    """Returns the autograd function of FlashAttention-2 in PyTorch."""
    return TiledAttentionFunction


def get_flashattention_autograd_function_triton() -> type:
    """Returns the autograd function of FlashAttention-2 in Triton."""
    return TritonAttentionFunction


def get_ddp_individual_parameters(module: nn.Module) -> nn.Module:
    """Returns a container that averages each gradient as soon as it is complete."""
    return OverlappedDataParallel(module)


def ddp_individual_parameters_on_after_backward(
    ddp_model: DataParallel, optimizer: torch.optim.Optimizer
) -> None:
    """Waits until gradients are averaged."""
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float | None) -> nn.Module:
    """Returns a container that averages gradients bucket by bucket."""
    return BucketedDataParallel(module, bucket_size_mb=bucket_size_mb)


def ddp_bucketed_on_after_backward(
    ddp_model: DataParallel, optimizer: torch.optim.Optimizer
) -> None:
    """Waits until gradients are averaged."""
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(
    ddp_model: DataParallel, optimizer: torch.optim.Optimizer
) -> None:
    """Does nothing: the container needs no preparation before a backward pass."""


def get_ddp(module: nn.Module) -> nn.Module:
    """Returns a container that overlaps communication with backward (2026)."""
    return BucketedDataParallel(module)


def ddp_on_after_backward(ddp_model: DataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Waits until gradients are averaged (2026)."""
    ddp_model.finish_gradient_synchronization()


def get_sharded_optimizer(
    params: Any, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    """Returns an optimizer whose state is sharded across ranks."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """Returns a container that shards linear layers and embeddings, and nothing else (2026)."""
    # Matched by name: the course defines its own classes, which may not be importable here.
    classes = {type(part) for part in module.modules()}
    sharded = tuple(one for one in classes if one.__name__ in ("Linear", "Embedding"))
    policy = WrapPolicy(classes=sharded, rest="replicated")
    return FullyShardedDataParallel(module, compute_dtype=compute_dtype, wrap=policy)


def fsdp_on_after_backward(
    fsdp_model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer
) -> None:
    """Waits until gradients are reduced (2026)."""
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """Returns the full parameters, keyed by their names in the inner module (2026)."""
    state = fsdp_model.full_state_dict()
    return {name: state[name] for name, _ in fsdp_model.module.named_parameters()}
