"""Trains a small model under a layout and compares it with one process that has all data."""

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.core.plan import ParallelLayout
from paceline.core.specs import ModelShape
from paceline.models import TransformerLM
from paceline.parallel.dtensor import complete_gradients
from paceline.parallel.mesh.context import ContextShare
from paceline.parallel.mesh.layout import MeshGroups, apply_layout, clip_grad_norm
from paceline.parallel.mesh.tensor import summed_loss, vocabulary_parallel
from paceline.parallel.strategies import without_synchronization
from tests import devices

CONTEXT, SEQUENCES, MICRO_BATCHES = 16, 4, 2
MAX_NORM = 0.3
"""Below the gradient norm, so that clipping has an effect."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshCase:
    layout: ParallelLayout
    tied: bool = False
    vocab_size: int = 50
    num_kv_heads: int = 4
    autocast: bool = False
    compiles: bool = False
    steps: int = 2

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            vocab_size=self.vocab_size,
            d_model=32,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=self.num_kv_heads,
            max_context_length=CONTEXT,
            tied_embeddings=self.tied,
        )


def batch(case: MeshCase, step: int, data_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    tokens = torch.randint(case.vocab_size, (SEQUENCES, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # With a smaller eps, Adam turns rounding errors of tiny gradients into full steps.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_case(rank: int, world_size: int, case: MeshCase) -> None:
    """Trains both models; compares losses, norms, gradients and weights after every step."""
    torch.manual_seed(0)
    recompute: Any = case.layout.activation_checkpointing
    model = TransformerLM(case.shape, activation_checkpointing=recompute)
    model.to(devices.own_device())
    oracle = copy.deepcopy(model)
    groups = MeshGroups(case.layout, rank, world_size, devices.own_device())
    apply_layout(model, groups, compile_blocks=case.compiles)
    optimizer, expected_optimizer = make_optimizer(model), make_optimizer(oracle)
    assert list(dict(model.named_parameters())) == list(dict(oracle.named_parameters()))
    for step in range(case.steps):
        loss = _pass(case, model, groups, step)
        total = torch.zeros(())
        for data_rank in range(groups.data_ranks):
            tokens, targets = batch(case, step, data_rank)
            with torch.autocast(devices.own_device().type, torch.bfloat16, enabled=case.autocast):
                logits = oracle(tokens)
            part = summed_loss(logits, targets) / (SEQUENCES * CONTEXT * groups.data_ranks)
            part.backward()
            total += part.detach()
        # Rounding errors grow with the steps.
        tolerance = 2e-2 if case.autocast else 1e-6 if step == 0 else 1e-5
        torch.testing.assert_close(loss, total, atol=tolerance, rtol=tolerance)
        own_norm = _norm_of_whole(model)
        norm = clip_grad_norm(model, groups, MAX_NORM)
        torch.testing.assert_close(norm, own_norm, atol=0, rtol=1e-6)
        expected_norm = nn.utils.clip_grad_norm_(oracle.parameters(), MAX_NORM)
        assert expected_norm > MAX_NORM
        torch.testing.assert_close(norm, expected_norm, atol=0, rtol=tolerance)
        if case.autocast:
            for each in (optimizer, expected_optimizer):
                each.zero_grad()
            continue  # The two round to bf16 in different places.
        _require_close(model, oracle, f"step {step}: gradient of", tolerance, gradients=True)
        for each in (optimizer, expected_optimizer):
            each.step()
            each.zero_grad()
        _require_close(model, oracle, f"after step {step}:", tolerance)


def _pass(case: MeshCase, model: nn.Module, groups: MeshGroups, step: int) -> Tensor:
    """Computes averaged gradients in two micro-batches; returns the mean loss of all ranks."""
    tokens, targets = batch(case, step, groups.data_rank)
    if groups.context is not None:
        share = ContextShare(groups.context)
        tokens, targets = share.take(tokens), share.take(targets)
    total = torch.zeros(())
    parts = zip(tokens.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)
    for number, (inputs, expected) in enumerate(parts, start=1):
        with vocabulary_parallel(groups.tensor is not None):
            if number < MICRO_BATCHES:
                with without_synchronization(model):
                    total += _backward(case, model, inputs, expected)
            else:
                total += _backward(case, model, inputs, expected)
    total /= groups.gradient_ranks
    dist.all_reduce(total)
    return total / case.layout.tensor


def _backward(case: MeshCase, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(devices.own_device().type, torch.bfloat16, enabled=case.autocast):
        logits = model(tokens)
    own_tokens = SEQUENCES * CONTEXT // case.layout.context
    loss = summed_loss(logits, targets) / own_tokens
    loss.backward()
    return loss.detach()


def _norm_of_whole(model: nn.Module) -> Tensor:
    """Returns the norm of the full gradients, gathered from all ranks."""
    complete_gradients(model)
    gradients = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    return torch.cat([each.flatten().double() for each in gradients]).norm().float()


def _require_close(
    model: nn.Module, oracle: nn.Module, what: str, tolerance: float, *, gradients: bool = False
) -> None:
    expected = dict(oracle.named_parameters())
    for name, parameter in model.named_parameters():
        own = parameter.grad if gradients else parameter
        theirs = expected[name].grad if gradients else expected[name]
        assert own is not None, name
        assert theirs is not None, name
        torch.testing.assert_close(
            whole(own),
            theirs.detach(),
            atol=tolerance,
            rtol=1e-5,
            msg=lambda text, name=name: f"{what} {name}: {text}",
        )
