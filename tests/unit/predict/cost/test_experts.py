"""Tests of mixtures of experts: exact parameter counts, and hand-computed device memory."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.accounting import flops_per_token
from paceline.accounting.counts import all_parameters, other_parameters, router_parameters
from paceline.core import ModelShape, ParallelLayout, Precision, find_device
from paceline.core.errors import HardwareError
from paceline.core.presets import find_preset, mixture_names
from paceline.core.specs import Experts
from paceline.planner.calibrations.cases import group_cases, predictable
from paceline.planner.published import published_models, published_runs
from paceline.predict.cost.activations import kept_activations, routed_bytes
from paceline.predict.cost.framework_memory import FrameworkMemory, usable_bytes
from paceline.predict.cost.layouts import CHECKPOINTING, Layouts, Workload
from paceline.predict.cost.memory import (
    blocks_with_experts,
    expert_shards,
    layout_memory,
    layout_state_bytes,
)

MIXED = Precision(parameters="bfloat16", compute="bfloat16", master_weights=True)
# Counts of the published weight indices, less parameters that are not modelled: query and key norms
# (48 blocks of 2 x 128), norms of latent attention (61 of 2,048) and biases of 58 routers (256
# experts).
PARAMETERS = {
    "mixtral-8x7B": 46_702_792_704,
    "qwen3-30B-A3B": 30_532_122_624 - 48 * 256,
    "deepseek-v3": 671_026_419_200 - 61 * 2_048 - 58 * 256,
}
# Mixtral: 32 blocks of attention (41,943,040) and two norms, embedding, output layer, final norm.
OTHERS = 32 * (41_943_040 + 2 * 4_096) + 2 * 131_072_000 + 4_096
EXPERTS = 32 * 8 * 3 * 4_096 * 14_336
ROUTERS = 32 * 4_096 * 8


def _workload(name: str = "mixtral-8x7B", **changes: Any) -> Workload:
    shape, experts = find_preset(name)
    values: dict[str, Any] = {
        "shape": shape,
        "experts": experts,
        "precision": MIXED,
        "context_length": 4096,
        "micro_batch": 1,
        "num_micro_batches": 8,
    }
    return Workload(**values | changes)


@pytest.mark.parametrize("name", PARAMETERS)
def test_all_parameters_to_the_digit(name: str) -> None:
    assert all_parameters(*find_preset(name)) == PARAMETERS[name]


def test_presets_are_the_models_of_the_published_rows() -> None:
    names = {
        "qwen3-30B-A3B": "Qwen3_30B_a3B",
        "qwen3-235B-A22B": "Qwen3_235B_a22B",
        "deepseek-v3": "DeepSeekV3",
    }
    assert {*names, "mixtral-8x7B"} == set(mixture_names())
    for preset, published in names.items():
        shape, experts = find_preset(preset)
        model = published_models()[published]
        assert dataclasses.replace(shape, rope_theta=10_000.0) == model.shape(4096)
        assert experts is not None
        assert experts == model.experts


def test_parts_add_up_to_all() -> None:
    shape, experts = find_preset("mixtral-8x7B")
    assert experts is not None
    assert other_parameters(experts, shape).total == OTHERS
    assert 32 * router_parameters(experts, shape) == ROUTERS
    assert PARAMETERS["mixtral-8x7B"] == OTHERS + EXPERTS + ROUTERS


def test_flops_are_those_of_active_weights() -> None:
    shape, _ = find_preset("deepseek-v3")
    # Attention, nine experts (or a dense layer of that width) and the output layer: 37 billion with
    # the embedding.
    active = 61 * (187_105_280 + 3 * 7168 * 18_432) + 129_280 * 7168
    scores = 12 * 61 * 128 * 160 * 4096
    assert flops_per_token(shape, 4096).model == 6 * active + scores


def test_states_of_one_device_by_hand() -> None:
    layout = ParallelLayout(
        shard=4, sharding="optimizer", tensor=2, sequence_parallel=True, expert=8
    )
    held = layout_state_bytes(Layouts.of([layout]), _workload())
    weights = OTHERS / 2 + EXPERTS / 8 + ROUTERS
    assert weights == 6_440_486_912
    assert held.parameters == pytest.approx([2 * weights])
    assert held.gradients == pytest.approx([4 * weights])
    # Eight ranks hold eight different parts of the experts, so no expert state is left to shard.
    assert held.optimizer_state == pytest.approx([12 * (OTHERS / 8 + EXPERTS / 8 + ROUTERS / 4)])


@pytest.mark.parametrize("expert", [1, 2, 4, 8])
def test_expert_ranks_leave_the_optimizers_share_as_it_is(expert: int) -> None:
    layout = ParallelLayout(shard=8, sharding="optimizer", expert=expert)
    layouts, workload = Layouts.of([layout]), _workload()
    held = layout_state_bytes(layouts, workload)
    assert expert_shards(layouts) == [8 / expert]
    assert held.optimizer_state == pytest.approx([12 * PARAMETERS["mixtral-8x7B"] / 8])
    assert held.parameters == pytest.approx([2 * (OTHERS + EXPERTS / expert + ROUTERS)])


def test_fully_sharded_experts_are_gathered_block_by_block() -> None:
    layout = ParallelLayout(shard=16, sharding="parameters", expert=8)
    held = layout_state_bytes(Layouts.of([layout]), _workload())
    assert held.parameters == pytest.approx([2 * PARAMETERS["mixtral-8x7B"] / 16])
    block = 41_943_040 + EXPERTS / 32 / 8 + ROUTERS / 32
    assert held.gathered == pytest.approx([2 * 3 * block])
    autocast = dataclasses.replace(MIXED, parameters="float32", autocast=True)
    copies = layout_state_bytes(
        Layouts.of([ParallelLayout(replicate=8, expert=8)]), _workload(precision=autocast)
    ).weight_copies
    matrices = 32 * 41_943_040 + 131_072_000
    assert copies == pytest.approx([2 * (matrices + EXPERTS / 8 + ROUTERS)])


def test_the_fullest_stage_has_experts_in_all_its_blocks() -> None:
    workload = _workload("deepseek-v3")
    assert workload.experts is not None
    for stages, blocks in ((1, 58), (3, 21), (9, 7), (16, 4), (61, 1)):
        layouts = Layouts.of([ParallelLayout(pipeline=stages)])
        assert blocks_with_experts(layouts, workload, workload.experts) == [blocks]


def test_what_routing_keeps_of_a_token() -> None:
    fused = FrameworkMemory(fused=True)
    qwen = _workload("qwen3-30B-A3B")
    assert qwen.experts is not None
    assert routed_bytes(qwen, qwen.experts) == 2 * 2 * 8 * 2048 + 5 * 128
    lean = dataclasses.replace(qwen, framework_memory=fused)
    assert routed_bytes(lean, qwen.experts) == 2 * 8 * 2048 + 5 * 128
    float8 = dataclasses.replace(fused, float8_inputs=True)
    assert (
        routed_bytes(dataclasses.replace(qwen, framework_memory=float8), qwen.experts)
        == 8 * 2048 + 5 * 128
    )
    deepseek = _workload("deepseek-v3", framework_memory=fused)
    assert deepseek.experts is not None
    mean = 58 / 61 * (2 * 8 * 7168 + 5 * 256)
    assert routed_bytes(deepseek, deepseek.experts) == pytest.approx(mean)


def test_axes_divide_what_routing_keeps() -> None:
    def kept(**axes: Any) -> float:
        layouts = Layouts.of([ParallelLayout(**axes)])
        return float(kept_activations(layouts, _workload())[0])

    assert kept(tensor=4, sequence_parallel=True) == kept() / 4
    assert kept(context=2) == kept() / 2
    # Every rank receives as many tokens as it sends.
    assert kept(replicate=8, expert=8) == kept()
    full = kept(activation_checkpointing="full")
    assert full == 32 * 4096 * 2 * 4096


class _Routed(nn.Module):
    """One gated feed-forward layer per expert; tokens are sorted by expert."""

    def __init__(self, shape: ModelShape, experts: Experts) -> None:
        super().__init__()
        self.chosen = experts.experts_per_token
        self.router = nn.Linear(shape.d_model, experts.num_experts, bias=False)

        def matrices(rows: int, columns: int) -> nn.ModuleList:
            made = (nn.Linear(rows, columns, bias=False) for _ in range(experts.num_experts))
            return nn.ModuleList(made)

        self.gate, self.up = (matrices(shape.d_model, experts.width) for _ in range(2))
        self.down = matrices(experts.width, shape.d_model)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(self.router(x).float(), dim=-1)
        weights, chosen = probabilities.topk(self.chosen, dim=-1)
        order = chosen.flatten().argsort()
        tokens = order // self.chosen
        counts = torch.bincount(chosen.flatten(), minlength=len(self.gate)).tolist()
        outputs = [
            self.down[each](F.silu(self.gate[each](part)) * self.up[each](part))
            for each, part in enumerate(x[tokens].split(counts))
        ]
        weighted = torch.cat(outputs) * weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        return weighted[order.argsort()].view(len(x), self.chosen, -1).sum(dim=1)


def test_routing_keeps_what_torch_packs() -> None:
    experts = Experts(num_experts=8, experts_per_token=2, width=192)
    shape = ModelShape(vocab_size=10, d_model=256, d_ff=384, num_layers=1, num_heads=4)
    layer = _Routed(shape, experts).to(torch.bfloat16)
    inputs = torch.randn(96, shape.d_model, dtype=torch.bfloat16, requires_grad=True)
    others = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), inputs)}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer(inputs)
    assert outputs.requires_grad
    packed = sum(each.untyped_storage().nbytes() for at, each in saved.items() if at not in others)
    workload = _workload(shape=shape, experts=experts)
    gated = 4 * 2 * 2 * experts.width
    # The difference is token indices and routing weights, which are not counted.
    assert packed / 96 == pytest.approx(routed_bytes(workload, experts) + gated, rel=0.03)


def test_no_published_run_of_experts_is_refused() -> None:
    # These runs do not report memory, but with full recomputation each must fit its device.
    cases = [case for case in predictable(published_runs()) if case.experts is not None]
    checked = 0
    for group in group_cases(cases):
        try:
            capacity = usable_bytes(find_device(group.variant.device))
        except HardwareError:
            continue
        full = np.full(len(group.index), CHECKPOINTING["full"])
        lean = dataclasses.replace(group.layouts, checkpointing=full)
        assert (layout_memory(lean, group.workload).total <= capacity).all()
        checked += len(group.index)
    assert checked >= 40
