"""Compares pipelines with one process that has the whole model and the whole batch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.core.plan import ParallelLayout
from paceline.core.specs import ModelShape
from paceline.models import TransformerLM
from paceline.parallel import RankPool
from paceline.parallel.mesh.layout import MeshGroups
from paceline.parallel.mesh.pipeline import Pipeline
from paceline.training.parallelize import place_model
from tests import devices

Pools = Callable[[int], RankPool]
CONTEXT, SEQUENCES, MICRO_BATCHES = 12, 8, 4


def shape_of(num_layers: int = 4, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        vocab_size=50,
        d_model=32,
        d_ff=48,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        max_context_length=CONTEXT,
        tied_embeddings=tied,
    )


def batch(step: int, data_rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    tokens = torch.randint(50, (SEQUENCES, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return total / (SEQUENCES * CONTEXT)


def pipeline_of(
    model: TransformerLM, interleave: int = 1, **options: Any
) -> tuple[Pipeline, dict[str, nn.Parameter]]:
    """Returns the pipeline over all ranks, and this rank's parameters by name."""
    num_ranks = dist.get_world_size()
    layout = ParallelLayout(pipeline=num_ranks, pipeline_interleave=interleave)
    pipeline = place_model(
        model,
        MeshGroups(layout, dist.get_rank(), num_ranks, devices.own_device()),
        context_length=CONTEXT,
        num_micro_batches=MICRO_BATCHES,
        loss=mean_loss,
        **options,
    )
    assert pipeline is not None
    named = [pair for stage in pipeline.stages.values() for pair in stage.named_parameters()]
    return pipeline, dict(named)


def _train(
    _rank: int,
    _world_size: int,
    interleave: int,
    tied: bool,
    recompute: bool,
    num_layers: int,
    num_steps: int = 3,
) -> set[str]:
    torch.manual_seed(0)
    checkpointing = "full" if recompute else "none"
    model = TransformerLM(
        shape_of(num_layers, tied=tied), attention="sdpa", activation_checkpointing=checkpointing
    ).to(devices.own_device())
    oracle = copy.deepcopy(model)
    pipeline, own = pipeline_of(model, interleave)
    expected = dict(oracle.named_parameters(remove_duplicate=False))
    # With a smaller eps, Adam turns rounding errors of tiny gradients into full steps.
    options = {"lr": 1e-2, "eps": 1e-4}
    optimizers = [torch.optim.AdamW(own.values(), **options)]
    optimizers.append(torch.optim.AdamW(oracle.parameters(), **options))
    for step in range(num_steps):
        # With tied embeddings, rounding differences due to the summation order grow: a gradient
        # differs by 5e-6 in the seventh step.
        tolerance = 1e-4 if tied and step >= 3 else 1e-6
        tokens, targets = batch(step)
        loss = pipeline.forward_and_backward(tokens, targets)
        whole = mean_loss(oracle(tokens), targets)
        whole.backward()
        torch.testing.assert_close(loss, whole.detach(), atol=tolerance, rtol=1e-6)
        for name, parameter in own.items():
            what = f"step {step}, gradient of {name}"
            _require_close(parameter.grad, expected[name].grad, what, tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in own.items():
            _require_close(parameter.data, expected[name].data, f"step {step}, {name}", tolerance)
        with torch.no_grad():
            whole = mean_loss(oracle(tokens), targets)
        for num_micro_batches in (1, 2):
            evaluated = pipeline.evaluate(tokens, targets, num_micro_batches)
            torch.testing.assert_close(evaluated, whole, atol=tolerance, rtol=1e-6)
        assert all(parameter.grad is None for parameter in own.values())
    return set(own)


def _require_close(
    own: Tensor | None, expected: Tensor | None, what: str, tolerance: float
) -> None:
    assert own is not None, what
    assert expected is not None, what
    torch.testing.assert_close(
        own, expected, atol=tolerance, rtol=1e-5, msg=lambda text: f"{what}: {text}"
    )


def _require_whole(names: list[set[str]], num_layers: int) -> None:
    """Requires that every parameter is on exactly one rank, under its name in the model."""
    whole = TransformerLM(shape_of(num_layers))
    assert set().union(*names) == set(whole.state_dict())
    assert sum(len(own) for own in names) == len(whole.state_dict())


@pytest.mark.parametrize(("interleave", "tied"), [(1, True), (2, False)])
def test_a_pipeline_trains_as_one_process(rank_pool: Pools, interleave: int, tied: bool) -> None:
    names = rank_pool(2).run(_train, interleave, tied, False, 4)
    _require_whole(names, 4)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("interleave", [1, 2])
def test_every_pipeline_trains_as_one_process(
    rank_pool: Pools, world_size: int, recompute: bool, tied: bool, interleave: int
) -> None:
    num_layers = world_size * interleave + 1  # One stage has more layers than the others.
    steps = 10 if world_size == 4 else 3
    names = rank_pool(world_size).run(_train, interleave, tied, recompute, num_layers, steps)
    _require_whole(names, num_layers)


def _refuse(_rank: int, world_size: int) -> None:
    model = TransformerLM(shape_of()).to(devices.own_device())
    pipeline, _ = pipeline_of(model)
    tokens, targets = batch(0)
    with pytest.raises(UsageError, match="7 sequences cannot be split into 4 equal"):
        pipeline.forward_and_backward(tokens[:7], targets[:7])
    # Nothing was sent, so the pipeline still works.
    assert pipeline.forward_and_backward(tokens, targets) > 0
    (stage,) = pipeline.stages.values()
    stage.register_parameter("spare", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(UsageError, match=r"left spare without a gradient; every parameter"):
        pipeline.forward_and_backward(tokens, targets)


def test_what_a_schedule_cannot_run_is_refused(rank_pool: Pools) -> None:
    rank_pool(2).run(_refuse)
